// SPDX-License-Identifier: Apache-2.0
#include <hoist/optim_cpu/accumulate.hpp>

#include "tiles.hpp"

namespace hoist::optim::test::accumulate_test {
namespace {

TEST(Accumulate, EveryInstructionSetTypeAndCountIsTheSumInFloat) {
  for (const DType dtype : kDTypes) {
    for (const auto& name : supported_instruction_sets()) {
      const Forced forced(name);
      for (std::size_t count = 0; count < 70; ++count) {
        for (const std::size_t offset : {0u, 1u, 3u}) {
          Rng rng(count + 1);
          Guarded<std::byte> gradient(count * dtype_bytes(dtype), offset * dtype_bytes(dtype));
          Guarded<float> sums(count, offset);
          std::vector<float> expected(count);
          for (int micro_batch = 0; micro_batch < 3; ++micro_batch) {
            for (std::size_t i = 0; i < count; ++i) {
              put_gradient(gradient.data(), dtype, i, any_scale(rng, -149, 30));
              const float value = get_gradient(gradient.data(), dtype, i);
              expected[i] = micro_batch == 0 ? value : expected[i] + value;
            }
            accumulate_gradient(sums.data(), gradient.data(), dtype, count,
                                micro_batch == 0 ? Accumulate::overwrite : Accumulate::add);
          }
          for (std::size_t i = 0; i < count; ++i) {
            ASSERT_EQ(std::bit_cast<std::uint32_t>(sums.data()[i]), std::bit_cast<std::uint32_t>(expected[i]))
                << name << " " << dtype_name(dtype) << " element " << i << " of " << count << " seed " << count + 1;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace hoist::optim::test::accumulate_test
