// SPDX-License-Identifier: Apache-2.0
// bench/bench_kernels.cpp - the loops that every gradient and weight passes: pack and unpack, reduce, norm, and the
// checksum of stored bytes, on each instruction set; Google Benchmark, one thread each.
//
//   bench_kernels [--benchmark_filter=REGEX] [--benchmark_format=json]
//
// `copy` is memcpy over as much memory, read and written: the limit the others stand beside. bytes_per_second counts
// what a kernel reads and writes. Sizes are a shard in the second-level cache, and one far beyond the last.
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include <hoist/comm/host_collectives.hpp>
#include <hoist/core/checksum.hpp>
#include <hoist/core/digest.hpp>
#include <hoist/core/dtype.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/core/units.hpp>
#include <hoist/optim_cpu/accumulate.hpp>
#include <hoist/optim_cpu/norm.hpp>
#include <hoist/optim_cpu/update.hpp>

namespace {

using namespace hoist;

constexpr std::int64_t kSmall = 64 << 10, kLarge = 16 << 20;  // elements

std::vector<float> values(std::int64_t count) {
  std::vector<float> all(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<float>(random_uniform(7, i) - 0.5);
  return all;
}
std::vector<bf16> halves(std::int64_t count) {
  std::vector<bf16> all;
  for (const float value : values(count)) all.push_back(to_bf16(value));
  return all;
}

void moved(benchmark::State& state, std::int64_t bytes_per_element) {
  state.SetBytesProcessed(state.iterations() * state.range(0) * bytes_per_element);
}

void copy(benchmark::State& state) {
  const std::vector<bf16> from = halves(state.range(0));
  std::vector<bf16> to(from.size());
  for (auto _ : state) {
    std::memcpy(to.data(), from.data(), from.size() * sizeof(bf16));
    benchmark::ClobberMemory();
  }
  moved(state, 4);
}

// An fp32 master into the bf16 weight that goes up and the 16 bits that stay.
void pack_master(benchmark::State& state) {
  const std::vector<float> masters = values(state.range(0));
  std::vector<bf16> weights(masters.size());
  std::vector<std::int16_t> remainders(masters.size());
  for (auto _ : state) {
    for (std::size_t i = 0; i < masters.size(); ++i) {
      const SplitMaster split = split_master(masters[i]);
      weights[i] = split.weight;
      remainders[i] = split.remainder;
    }
    benchmark::ClobberMemory();
  }
  moved(state, 8);
}

void unpack_master(benchmark::State& state) {
  std::vector<float> masters = values(state.range(0));
  std::vector<bf16> weights(masters.size());
  std::vector<std::int16_t> remainders(masters.size());
  for (std::size_t i = 0; i < masters.size(); ++i) {
    const SplitMaster split = split_master(masters[i]);
    weights[i] = split.weight;
    remainders[i] = split.remainder;
  }
  for (auto _ : state) {
    for (std::size_t i = 0; i < masters.size(); ++i) masters[i] = join_master(weights[i], remainders[i]);
    benchmark::ClobberMemory();
  }
  moved(state, 8);
}

// The owner's part of a reduce-scatter on CPUs: every rank's contribution to a shard, in rank order.
template <DType dtype>
void reduce(benchmark::State& state) {
  const auto ranks = static_cast<int>(state.range(1));
  const auto bytes = static_cast<std::int64_t>(dtype_bytes(dtype));
  const std::vector<bf16> received = halves(state.range(0) * ranks * bytes / 2);
  std::vector<std::byte> shard(static_cast<std::size_t>(state.range(0) * bytes));
  for (auto _ : state) {
    comm::sum_in_rank_order(shard.data(), reinterpret_cast<const std::byte*>(received.data()), dtype, ranks,
                            static_cast<std::uint64_t>(state.range(0)), 1.0f / static_cast<float>(ranks));
    benchmark::ClobberMemory();
  }
  moved(state, bytes * (ranks + 1));
}

template <DType dtype>
void norm(benchmark::State& state) {
  const auto bytes = static_cast<std::int64_t>(dtype_bytes(dtype));
  const std::vector<bf16> gradient = halves(state.range(0) * bytes / 2);
  std::vector<double> partial(divide_up(static_cast<std::size_t>(state.range(0)), kNormChunkElements));
  for (auto _ : state) {
    optim::sums_of_squares(gradient.data(), dtype, static_cast<std::size_t>(state.range(0)), partial);
    benchmark::DoNotOptimize(partial.data());
  }
  moved(state, bytes);
}

void accumulate(benchmark::State& state) {
  const std::vector<bf16> gradient = halves(state.range(0));
  std::vector<float> sums(gradient.size());
  for (auto _ : state) {
    optim::accumulate_gradient(sums.data(), gradient.data(), DType::bf16, sums.size(), optim::Accumulate::add);
    benchmark::ClobberMemory();
  }
  moved(state, 10);
}

void tile_checksum_on(benchmark::State& state, const std::string& instruction_set) {
  const std::vector<bf16> tile = halves(state.range(0));
  optim::force_instruction_set(instruction_set);
  for (auto _ : state)
    benchmark::DoNotOptimize(tile_checksum({.tile = 1}, std::as_bytes(std::span(tile.data(), tile.size()))));
  optim::force_instruction_set("");
  moved(state, 2);
}

// Each piece that was read is verified, then copied on.
void verified_copy(benchmark::State& state) {
  const std::vector<bf16> from = halves(state.range(0));
  std::vector<bf16> to(from.size());
  constexpr std::size_t kPieceElements = 64 << 10;
  for (auto _ : state) {
    for (std::size_t i = 0; i < from.size(); i += kPieceElements) {
      benchmark::DoNotOptimize(tile_checksum({.tile = 1}, std::as_bytes(std::span(from.data() + i, kPieceElements))));
      std::memcpy(to.data() + i, from.data() + i, kPieceElements * sizeof(bf16));
    }
    benchmark::ClobberMemory();
  }
  moved(state, 4);
}

// XXH3, as the distribution builds it: for comparison.
void digest(benchmark::State& state) {
  const std::vector<bf16> tile = halves(state.range(0));
  for (auto _ : state) {
    Digest digest;
    digest.update(std::as_bytes(std::span(tile.data(), tile.size())));
    benchmark::DoNotOptimize(digest.value());
  }
  moved(state, 2);
}

void sizes(benchmark::internal::Benchmark* bench) { bench->Arg(kSmall)->Arg(kLarge); }
void sizes_and_ranks(benchmark::internal::Benchmark* bench) {
  for (const std::int64_t ranks : {2, 4, 8}) bench->Args({kSmall, ranks})->Args({kLarge / ranks, ranks});
}

BENCHMARK(copy)->Apply(sizes);
BENCHMARK(pack_master)->Apply(sizes);
BENCHMARK(unpack_master)->Apply(sizes);
BENCHMARK(reduce<DType::bf16>)->Apply(sizes_and_ranks);
BENCHMARK(reduce<DType::fp32>)->Apply(sizes_and_ranks);
BENCHMARK(norm<DType::bf16>)->Apply(sizes);
BENCHMARK(norm<DType::fp32>)->Apply(sizes);
BENCHMARK(accumulate)->Apply(sizes);
BENCHMARK(verified_copy)->Apply(sizes);
BENCHMARK(digest)->Apply(sizes);

}  // namespace

int main(int argc, char** argv) {
  for (const std::string& name : optim::supported_instruction_sets())
    sizes(benchmark::RegisterBenchmark(("tile_checksum/" + name).c_str(), tile_checksum_on, name));
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
