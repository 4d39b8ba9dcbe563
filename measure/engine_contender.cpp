// SPDX-License-Identifier: Apache-2.0
#include <hoist/measure/contender.hpp>

namespace hoist::measure {

namespace {

class EngineContender final : public Contender {
 public:
  EngineContender(std::span<Drive* const> drives, const StopFlag* stop)
      : drives_(drives.begin(), drives.end()), stop_(stop) {}

  std::string name() const override { return "hoist"; }
  std::string description() const override { return drives_.front()->queue().description(); }

  LegResult run(const Leg& leg) override {
    const WorkloadResult result = run_workload(drives_, {.pattern = leg.pattern,
                                                         .region = leg.region,
                                                         .bytes_max = leg.region.length_bytes,
                                                         .seed = leg.seed,
                                                         .stop = stop_});
    return {.bytes = result.bytes(), .seconds = result.seconds, .processor_seconds = result.processor_seconds};
  }

 private:
  const std::vector<Drive*> drives_;
  const StopFlag* stop_;
};

}  // namespace

std::unique_ptr<Contender> make_engine_contender(std::span<Drive* const> drives, const StopFlag* stop) {
  return std::make_unique<EngineContender>(drives, stop);
}

}  // namespace hoist::measure
