// SPDX-License-Identifier: Apache-2.0
#include "this_machine.hpp"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <optional>

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <unistd.h>

#include <hoist/core/clock.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/named_file.hpp>
#include <hoist/core/open_file.hpp>
#include <hoist/core/processors.hpp>
#include <hoist/core/units.hpp>
#include <hoist/measure/kernels.hpp>
#include <hoist/measure/machine.hpp>
#include <hoist/measure/workload.hpp>
#include <hoist/platform/control_groups.hpp>
#include <hoist/platform/device.hpp>
#include <hoist/platform/free_memory.hpp>
#include <hoist/platform/gpu_memory.hpp>
#include <hoist/platform/host_memory.hpp>

#include "machine_file.hpp"
#include "output.hpp"
#include "storage.hpp"

namespace hoist::cli {

namespace {

namespace fs = std::filesystem;

constexpr double kGigabyte = 1e9;
constexpr double kGibibyte = 1024.0 * 1024 * 1024;
constexpr std::uint64_t kFileBytes = 512 * kMiB;
constexpr std::uint64_t kCopyBytes = 128 * kMiB;
constexpr int kCopies = 16;
constexpr int kSmallCopies = 200;

// Assumed: measuring them takes a model's own kernels, a power meter or a bill.
constexpr double kTflopsOfCore = 0.03, kTflopsOfGpu = 200;
constexpr double kWattsOfCore = 10, kWattsOfGpu = 500;
constexpr double kNetworkGbPerSecond = 5;  // between processes of a machine

// Empty if the environment names no directory of this user's own: in a shared one, such as /tmp, another user could
// make the file first.
std::string cache_file() {
  const char* const cache = std::getenv("XDG_CACHE_HOME");
  const char* const home = std::getenv("HOME");
  if (cache != nullptr && *cache != '\0') return fs::path(cache) / "hoist" / "machine.json";
  if (home != nullptr && *home != '\0') return fs::path(home) / ".cache" / "hoist" / "machine.json";
  return {};
}

// Processors that this process may use: `taskset` and a container may leave it fewer than the machine has.
std::size_t usable_processors() {
  return std::min<std::size_t>(platform::processor_count(), current_processors().size());
}

// A measurement is one of this name: with other processors the same host has other speeds.
std::string machine_name() {
  char name[256] = {};
  const bool is_named = ::gethostname(name, sizeof(name) - 1) == 0 && name[0] != '\0';
  return fmt::format("{}, {}", is_named ? name : "this machine", counted(usable_processors(), "processor"));
}

std::vector<std::string> absolute(const std::vector<std::string>& directories) {
  std::vector<std::string> paths;
  for (const std::string& directory : directories) paths.push_back(plain_path(absolute_path(directory)));
  return paths;
}

// The average speed of one drive in bytes a second, while all drives are read or written at once.
void measure_drives(const std::vector<std::string>& directories, const measure::StopFlag* stop, MachineSpec& spec) {
  const RuntimeOptions defaults;
  const std::uint64_t in_flight = defaults.aio_block_bytes * defaults.aio_queue_depth;
  check_paths(directories, kFileBytes);
  StorageRig rig(directories, kFileBytes, in_flight);
  rig.fill(stop, ProgressStyle::automatic);
  const auto bytes_per_second = [&](const auto& drives, measure::Pattern pattern) {
    const measure::WorkloadResult result = measure::run_workload(
        pointers(drives),
        {.pattern = pattern, .region = {0, kFileBytes}, .duration = std::chrono::seconds(1), .stop = stop});
    return result.bytes_per_second() / static_cast<double>(directories.size());
  };
  const auto drives = rig.drives({.block_bytes = defaults.aio_block_bytes, .queue_depth = defaults.aio_queue_depth});
  const auto gb_per_s = [&](measure::Pattern pattern) { return bytes_per_second(drives, pattern) / kGigabyte; };
  spec.drives.count = static_cast<double>(directories.size());
  spec.drives.directories = directories;
  spec.drives.read_gb_per_s = gb_per_s(measure::Pattern::read);
  spec.drives.write_gb_per_s = gb_per_s(measure::Pattern::write);
  spec.drives.mixed_gb_per_s = gb_per_s(measure::Pattern::mixed);
  // One small block after the other takes little but latency.
  const auto one_by_one = rig.drives({.block_bytes = kBlockAlignment, .queue_depth = 1});
  spec.drives.latency_us =
      1e6 * static_cast<double>(kBlockAlignment) / bytes_per_second(one_by_one, measure::Pattern::read);
  spec.drives.flush_us = 1e6 * measure::seconds_of_flush(pointers(drives), stop);
}

// GPUs, memory and free space: they are quick to ask for, and may change between two calls of `hoist plan`.
void fill_in_quick_facts(const std::vector<std::string>& directories, MachineSpec& spec) {
  const int gpus = platform::cuda_device_count();
  spec.gpus_per_node = gpus;
  if (gpus > 0) spec.device.memory = platform::gpu_memory(platform::cuda_memory_facts(0));
  const platform::MemorySize host = spec.device.memory == platform::GpuMemory::coherent
                                        ? platform::host_memory_beside_gpus()
                                        : platform::host_memory();
  spec.host.memory_gib = static_cast<double>(host.total_bytes) / kGibibyte;
  if (gpus > 0 && spec.device.memory != platform::GpuMemory::integrated)
    spec.device.memory_gib = static_cast<double>(platform::cuda_memory(0).total_bytes) / kGibibyte;
  double smallest = 1e12;
  for (const std::string& directory : directories) {
    std::error_code failed;
    const fs::space_info space = fs::space(directory, failed);
    if (failed) throw UsageError(fmt::format("--path {}: {}", directory, failed.message()));
    smallest = std::min(smallest, static_cast<double>(space.available) / kGigabyte);
  }
  spec.drives.capacity_gb = smallest;
}

double copy_gb_per_s(platform::Stream& stream, std::byte* target, const std::byte* source, platform::CopyKind kind) {
  stream.copy(target, source, kCopyBytes, kind);
  stream.synchronize();
  const TimePoint begin = Clock::now();
  for (int i = 0; i < kCopies; ++i) stream.copy(target, source, kCopyBytes, kind);
  stream.synchronize();
  return kCopies * static_cast<double>(kCopyBytes) / to_seconds(Clock::now() - begin) / kGigabyte;
}

double small_copy_us(platform::Stream& stream, std::byte* target, const std::byte* source) {
  const TimePoint begin = Clock::now();
  for (int i = 0; i < kSmallCopies; ++i) {
    stream.copy(target, source, kBlockAlignment, platform::CopyKind::host_to_device);
    stream.synchronize();
  }
  return 1e6 * to_seconds(Clock::now() - begin) / kSmallCopies;
}

void measure_device(bool is_gpu, MachineSpec& spec) {
  const platform::DeviceKind kind = is_gpu ? platform::DeviceKind::cuda : platform::DeviceKind::host;
  const auto device =
      platform::Device::create({.kind = kind, .memory_bytes = 2 * kCopyBytes, .host = {.poison = false}});
  const platform::HostMemory host({.bytes = kCopyBytes});
  const std::span<std::byte> memory = device->memory();
  device->acquired(memory);
  device->register_host(host.bytes());
  const auto stream = device->create_stream("measure");
  using platform::CopyKind;
  std::byte* const on_device = memory.data();
  spec.device.host_to_device_gb_per_s =
      copy_gb_per_s(*stream, on_device, host.bytes().data(), CopyKind::host_to_device);
  spec.device.device_to_host_gb_per_s =
      copy_gb_per_s(*stream, host.bytes().data(), on_device, CopyKind::device_to_host);
  spec.device.copy_latency_us = small_copy_us(*stream, on_device, host.bytes().data());
  // Read and written.
  if (is_gpu)
    spec.device.memory_gb_per_s = 2 * copy_gb_per_s(*stream, on_device + kCopyBytes, on_device, CopyKind::local);
  device->unregister_host(host.bytes());
}

MachineSpec measure_now(const std::vector<std::string>& directories, const measure::StopFlag* stop) {
  const auto now = std::chrono::time_point_cast<std::chrono::seconds>(std::chrono::system_clock::now());
  MachineSpec spec{.name = machine_name(),
                   .basis = fmt::format("measured by hoist plan, {:%Y-%m-%d %H:%M} UTC", fmt::gmtime(now))};
  const auto cores = static_cast<double>(usable_processors());
  measure_drives(directories, stop, spec);
  fill_in_quick_facts(directories, spec);
  const bool has_gpus = spec.gpus_per_node > 0;
  measure_device(has_gpus, spec);
  spec.host.update_gb_per_s = measure::compare_kernel({.optimizer = {.learning_rate = 1e-5}, .checksum = true},
                                                      {.state_bytes = 512 * kMiB, .pairs = 5, .stop = stop})
                                  .gigabytes_per_second();
  spec.host.power_watts = cores * kWattsOfCore;
  if (!has_gpus) spec.device.memory_gb_per_s = spec.host.update_gb_per_s;  // the host updates its device's memory
  spec.device.compute_tflops = has_gpus ? kTflopsOfGpu : cores * kTflopsOfCore;
  spec.device.power_watts = has_gpus ? kWattsOfGpu : 0;
  spec.network.in_node_gb_per_s = kNetworkGbPerSecond;
  spec.assumed = {"device.compute_tflops", "host.power_watts", "network.in_node_gb_per_s"};
  if (has_gpus) spec.assumed.emplace_back("device.power_watts");
  return spec;
}

// Returns nothing if there is no such file, or if it cannot be read, is damaged or of another version: it is only a
// cache.
std::optional<MachineSpec> kept_in(const std::string& path) {
  std::error_code failed;
  if (!fs::exists(path, failed)) return std::nullopt;
  try {
    return read_machine(path);
  } catch (const Error&) {
    return std::nullopt;
  }
}

// False where there is no place for it: the machine is measured again the next time.
bool keep(const MachineSpec& spec, const std::string& path) {
  try {
    if (path.empty()) throw UsageError("neither XDG_CACHE_HOME nor HOME is set");
    fs::create_directories(fs::path(path).parent_path());
    const auto replace = nlohmann::ordered_json::error_handler_t::replace;  // a directory's name need not be UTF-8
    replace_file(path, machine_file_json(spec).dump(2, ' ', false, replace) + "\n");
    return true;
  } catch (const std::exception& error) {
    complain("hoist plan: the measurement is not kept for the next time: {}\n", error.what());
    return false;
  }
}

}  // namespace

ThisMachine this_machine_spec(const std::vector<std::string>& directories, const measure::StopFlag* stop) {
  const std::vector<std::string> paths = absolute(directories);
  ThisMachine machine{.spec = {}, .cache_path = cache_file()};
  if (const auto kept = kept_in(machine.cache_path)) {
    machine.spec = *kept;
    const bool had_gpus = machine.spec.gpus_per_node > 0;
    if (machine.spec.name == machine_name() && machine.spec.drives.directories == paths &&
        had_gpus == (platform::cuda_device_count() > 0)) {
      fill_in_quick_facts(paths, machine.spec);
      return machine;
    }
  }
  machine.spec = measure_now(paths, stop);
  machine.measured_now = true;
  if (!keep(machine.spec, machine.cache_path)) machine.cache_path.clear();
  return machine;
}

}  // namespace hoist::cli
