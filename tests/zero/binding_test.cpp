// SPDX-License-Identifier: Apache-2.0
// Gathered memory of the embedder's: the same results, the same bytes, and read ahead like any other.
#include <algorithm>
#include <array>
#include <map>

#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/core/ledger.hpp>
#include <hoist/tests/support/faulty_backend.hpp>
#include <hoist/zero/predict/prediction.hpp>

#include "toy_model.hpp"

namespace hoist::test {
namespace {

// An embedder that gives every unit the same memory each time, and overwrites it as soon as it may.
struct Embedder {
  std::map<std::uint32_t, std::vector<std::byte>> memory;
  int bound = 0;

  Binding binding() {
    return {.bind =
                [this](UnitId unit, std::uint64_t bytes, StreamRef) {
                  memory[unit.index].resize(bytes);
                  ++bound;
                  return memory[unit.index].data();
                },
            .unbind =
                [this](UnitId unit, StreamRef stream) {
                  stream->fill(memory[unit.index].data(), 0xFF, memory[unit.index].size());
                  --bound;
                }};
  }
};

ToySetup setup_for(Placement parameters, Placement optimizer, const TempDirectory& directory) {
  const bool stores = parameters == Placement::nvme || optimizer == Placement::nvme;
  return toy_setup(parameters, optimizer, stores ? (directory / "store") : std::string());
}

TEST(Binding, WhoOwnsGatheredMemoryNeverChangesTheResult) {
  const Digests expected = train_once(toy_setup(Placement::device, Placement::device), ToyShape{}, 5);
  for (const Placement parameters : {Placement::device, Placement::pinned, Placement::nvme}) {
    for (const Placement optimizer : {Placement::device, Placement::pinned, Placement::nvme}) {
      const TempDirectory directory;
      Embedder embedder;
      ToyShape shape;
      shape.binding = embedder.binding();
      EXPECT_EQ(train_once(setup_for(parameters, optimizer, directory), shape, 5), expected)
          << static_cast<int>(parameters) << ", " << static_cast<int>(optimizer);
      EXPECT_EQ(embedder.bound, 0);
    }
  }
}

TEST(Binding, BytesFollowTheFormulaAndWeightsAreReadOnce) {
  const TempDirectory directory;
  const ToySetup setup = setup_for(Placement::nvme, Placement::nvme, directory);
  Embedder embedder;
  ToyShape shape;
  shape.binding = embedder.binding();
  Runtime runtime(setup.runtime);
  ToyModel model(runtime, setup.engine, shape);
  Engine& engine = model.initialize();
  model.train(1, 3);  // the first pass is recorded, not planned
  engine.settle();
  const std::uint64_t before = runtime.ledger().totals(Link::nvme_read).bytes;
  model.train(4, 9);
  engine.settle();
  const std::uint64_t read = runtime.ledger().totals(Link::nvme_read).bytes - before;
  const std::uint64_t formula = 6 * engine.formula_bytes().nvme_read;
  EXPECT_GE(read, formula);
  EXPECT_LE(read, formula + formula / 10);  // whole tiles of 4 KiB
}

TEST(Binding, PlaceSaysWhereAParameterWillLie) {
  const ToySetup setup = toy_setup(Placement::pinned, Placement::pinned);
  Embedder embedder;
  ToyShape shape;
  shape.binding = embedder.binding();
  Runtime runtime(setup.runtime);
  ToyModel model(runtime, setup.engine, shape);
  const std::vector<ParameterPlace> places = gathered_layout(setup.engine, model.model(), 1);
  ASSERT_EQ(places.size(), model.model().parameters().size());
  Engine& engine = model.initialize();
  const PassScope scope = engine.begin(Pass::evaluate);
  for (std::uint32_t p = 0; p < places.size(); ++p) {
    Lease lease = engine.gather(places[p].unit, model.stream());
    const std::vector<std::byte>& memory = embedder.memory[places[p].unit.index];
    EXPECT_EQ(lease.view(ParameterId{p}).data, memory.data() + places[p].offset_bytes);
    EXPECT_EQ(memory.size(), places[p].unit_bytes);
    lease.release(model.stream());
  }
}

TEST(Binding, MemoryThatCannotHoldElementsIsRefused) {
  const ToySetup setup = toy_setup(Placement::pinned, Placement::pinned);
  Runtime runtime(setup.runtime);
  alignas(64) static std::array<std::byte, 8192> memory;
  std::byte* next = memory.data() + 2;
  int bound = 0;
  const ParameterSpec spec{.name = "w", .shape = {16}, .dtype = DType::fp32};
  Model model;
  const UnitId unit = model.add_unit("u", {spec},
                                     {.binding = {.bind =
                                                      [&](UnitId, std::uint64_t, StreamRef) {
                                                        ++bound;
                                                        return next;
                                                      },
                                                  .unbind = [&](UnitId, StreamRef) { --bound; }}});
  Engine engine = Engine::create(runtime, setup.engine, model, [](ParameterId, std::uint64_t, std::span<float> out) {
    std::ranges::fill(out, 1.0f);
  });
  const auto stream = runtime.device().create_stream("compute");
  const PassScope pass = engine.begin(Pass::evaluate);
  EXPECT_THROW((void)engine.gather(unit, *stream), UsageError);
  EXPECT_EQ(bound, 0) << "it was not given back";
  next = memory.data() + 64;
  engine.gather(unit, *stream).release(*stream);
  stream->synchronize();
}

TEST(Binding, MemoryIsGivenBackWhenItCannotBeFilled) {
  const TempDirectory directory;
  ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory / "store");
  const auto faults = std::make_shared<Faults>(1);
  setup.runtime.make_aio_backend = [&](const aio::DriveQueueOptions& io) { return make_faulty_backend(io, faults); };
  Embedder embedder;
  ToyShape shape;
  shape.binding = embedder.binding();
  Runtime runtime(setup.runtime);
  ToyModel model(runtime, setup.engine, shape);
  Engine& engine = model.initialize();
  model.train(1, 2);
  engine.settle();
  faults->add({.operation = aio::Operation::read, .first = 0, .count = Faults::kForever});
  EXPECT_THROW(model.train(3, 4), IoError);
  EXPECT_EQ(embedder.bound, 0);
}

TEST(Binding, APredictionLeavesOutWhatTheEmbedderBrings) {
  const ToySetup setup = toy_setup(Placement::pinned, Placement::pinned);
  Embedder embedder;
  ToyShape shape;
  const Prediction own = predict(setup.runtime, setup.engine, describe(shape), 1);
  shape.binding = embedder.binding();
  const Prediction bound = predict(setup.runtime, setup.engine, describe(shape), 1);
  EXPECT_EQ(bound.gather_slots, 0u);
  EXPECT_LT(bound.device.least_bytes, own.device.least_bytes);
}

}  // namespace
}  // namespace hoist::test
