// SPDX-License-Identifier: Apache-2.0
// tests/cli/plan_fixture.hpp - `hoist plan` for a machine of round figures.
#pragma once

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "program.hpp"

namespace hoist::plan_test {

// Round figures for one GPU.
inline const nlohmann::json kMachine = nlohmann::json::parse(R"({
  "name": "a machine for tests", "basis": "round figures", "nodes": 1, "gpus_per_node": 8,
  "device": {"memory_gib": 80, "memory_gb_per_s": 1000, "host_to_device_gb_per_s": 25, "device_to_host_gb_per_s": 25,
             "compute_tflops": 200, "power_watts": 700},
  "host": {"memory_gib": 1024, "update_gb_per_s": 200, "power_watts": 300},
  "drives": {"count": 1, "capacity_gb": 8000, "read_gb_per_s": 6, "write_gb_per_s": 3, "endurance_tb_written": 1400},
  "network": {"in_node_gb_per_s": 100},
  "rates": {"node_per_hour": 3.6, "energy_per_kwh": 0.36, "currency": "EUR"}})");

class Plan : public test::ProgramTest {
 protected:
  Plan() { write("machine.json", kMachine.dump()); }
  // The row of the report with this placement.
  nlohmann::json row(const nlohmann::json& report, const char* parameters, const char* optimizer) {
    for (const auto& row : report["rows"])
      if (row["parameters"] == parameters && row["optimizer"] == optimizer) return row;
    ADD_FAILURE() << "no row " << parameters << " / " << optimizer;
    return {};
  }
  nlohmann::json best(const nlohmann::json& report) { return report["rows"][report["best"].get<std::size_t>()]; }
};

inline constexpr const char* kOneRank = " --machine machine.json --world 1 --json plan.json";

}  // namespace hoist::plan_test
