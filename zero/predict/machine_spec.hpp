// SPDX-License-Identifier: Apache-2.0
// zero/predict/machine_spec.hpp - a machine that a prediction is made for: what it has and how fast its links are.
//
// machines/README.md describes the file that a MachineSpec is read from. Speeds are those that a program reaches; a
// device's are its own, the host's and the drives' are divided among the ranks of a node.
//
// Threading  Pure functions.
#pragma once

#include <string>
#include <vector>

#include <hoist/zero/machine.hpp>
#include <hoist/zero/predict/step_time.hpp>

namespace hoist {

struct MachineSpec {
  std::string name;
  std::string basis;  // where the figures come from
  double nodes = 1;
  double gpus_per_node = 0;  // 0: ranks compute on the host device

  struct DeviceSpec {
    platform::GpuMemory memory = platform::GpuMemory::separate;
    double memory_gib = 0;  // of a GPU; 0 if it is integrated: then the host's is its memory, too
    double memory_gb_per_s = 0;
    double host_to_device_gb_per_s = 0;
    double device_to_host_gb_per_s = 0;
    double copy_latency_us = 0;  // latencies: from the end of a transfer's turn on its link until its bytes are there
    double compute_tflops = 0;   // in a model's kernels
    double power_watts = 0;
  } device;
  struct HostSpec {
    double memory_gib = 0;
    double update_gb_per_s = 0;  // read and written by the optimizer's update, all processors together
    double power_watts = 0;      // with the drives, without the GPUs
  } host;
  // All of one kind.
  struct DriveSpec {
    double count = 0;
    double capacity_gb = 0;
    double read_gb_per_s = 0;
    double write_gb_per_s = 0;
    double mixed_gb_per_s = 0;  // both directions at once, added up; 0: as if one waited for the other
    double latency_us = 0;
    double flush_us = 0;                     // until a flush ends, after writes
    double endurance_tb_written = 0;         // in the life of a drive; 0: unknown
    std::vector<std::string> directories{};  // for a store, one for each drive
  } drives;
  struct NetworkSpec {
    double in_node_gb_per_s = 0;  // received by a rank from ranks of its node; 0: there is one rank
    double between_nodes_gb_per_s = 0;
    double latency_us = 0;
  } network;
  struct RateSpec {
    double node_per_hour = 0;
    double energy_per_kwh = 0;
    std::string currency{};
  } rates;
  std::vector<std::string> assumed{};  // keys whose values nobody measured or looked up
};

// How the ranks of a job are spread: over as few nodes as have enough devices, evenly.
struct RankLayout {
  int nodes = 1;
  int ranks_per_node = 1;  // on the node that has most
};
// Errors: UsageError if the machine has too few devices, or says nothing of a network that the ranks need.
RankLayout rank_layout(const MachineSpec& spec, int world_size);
// As many ranks as the machine has devices.
int largest_world(const MachineSpec& spec);

// One node of the machine, as choose() in zero/machine.hpp takes it, so that budgets are those of a run there.
Machine node_of(const MachineSpec& spec, const RankLayout& layout);
// The options as a run on this node chooses them; `device` too, if they leave it open.
ChosenOptions choose_on(const MachineSpec& spec, const RankLayout& layout, RuntimeOptions options);
// The speeds of one rank. `compute_seconds` stays 0.
StepSpeeds speeds_of(const MachineSpec& spec, const RankLayout& layout);
// Space and endurance of a rank's part of the drives.
double drive_bytes(const MachineSpec& spec, const RankLayout& layout);
double endurance_bytes(const MachineSpec& spec, const RankLayout& layout);
// Energy that all nodes use at full power.
double joules(const MachineSpec& spec, const RankLayout& layout, double seconds);
// The cost of the nodes and of their energy; 0 if the machine file has no rate.
struct StepCost {
  double rent = 0;
  double energy = 0;
};
StepCost cost(const MachineSpec& spec, const RankLayout& layout, double seconds);

}  // namespace hoist
