// SPDX-License-Identifier: Apache-2.0
// platform/device.hpp - one accelerator: its memory budget and its streams. Start here.
//
// Two implementations: `cuda`, and `host`, a device made of CPU memory with one FIFO worker per stream, for machines
// without a GPU and for every test. The host device is a tool for correctness; its times are never quoted as GPU speed.
//
// Threading  Any thread.
// Memory     The whole budget is one block; tiers::DeviceArena allocates pieces of it. A GPU's is taken at
//            construction; the host device's is reserved there, and taken with the first use of each piece. A device
//            outlives its streams; an event may outlive both.
// Errors     DeviceError names the call, the code and the remedy; a budget that the GPU cannot provide is a
//            BudgetError.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include <hoist/platform/stream.hpp>

namespace hoist::platform {

enum class DeviceKind : std::uint8_t { host, cuda };

struct HostDeviceOptions {
  // Writes NaN over memory when it is acquired first and when it is released, so that a use before the first write or
  // after release shows in results. Under the address sanitizer a use after release is reported at once.
  bool poison = true;
  // Delays streams at random, by this seed, so that a missing wait fails a test. 0 is off.
  std::uint64_t chaos_seed = 0;
  // Copies between host and device take at least this long, each direction by itself, as over a GPU's link. 0 is off.
  std::uint64_t link_bytes_per_second = 0;
  // false: only streams may touch its memory, not host code, as with a GPU. If processor and kernel have protection
  // keys (x86 since 2017, pkeys(7)), a violation faults.
  bool host_accessible = true;
};

struct DeviceOptions {
  DeviceKind kind = DeviceKind::host;
  std::uint64_t memory_bytes = 0;  // the budget; a multiple of 4 KiB
  int ordinal = 0;                 // which GPU
  HostDeviceOptions host{};
  std::vector<int> numa_nodes{};  // of the host device's memory, as HostMemoryOptions has them
  std::vector<int> touch_cpus{};  // likewise
  Ledger* ledger = nullptr;       // counts copies if given; must outlive the device
};

class Device {
 public:
  static std::unique_ptr<Device> create(const DeviceOptions& options);
  virtual ~Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  virtual DeviceKind kind() const = 0;
  // One line for reports: "host device (CPU memory, 2 cores)", "NVIDIA H200, 139 GiB, sm_90".
  virtual std::string description() const = 0;
  // The budgeted block. Host code may dereference it only when host_accessible().
  virtual std::span<std::byte> memory() = 0;
  virtual bool host_accessible() const = 0;
  // `bytes` were returned to the arena: the host device poisons them. Nothing may be in flight on them, and nothing may
  // touch them until acquired() is called for them. Errors of acquired(): BudgetError if the machine lacks the memory.
  virtual void released(std::span<std::byte> bytes) = 0;
  virtual void acquired(std::span<std::byte> bytes) = 0;
  virtual std::unique_ptr<Stream> create_stream(std::string name) = 0;
  // Wraps a stream owned by the embedding program (cudaStream_t). Host device: UsageError.
  virtual std::unique_ptr<Stream> borrow_stream(void* native, std::string name) = 0;
  // Prepares host memory for asynchronous copies (cudaHostRegister); unregister_host, with the same span, or
  // destruction undoes it. A copy must be within one registered span.
  virtual void register_host(std::span<std::byte> bytes) = 0;
  virtual void unregister_host(std::span<std::byte> bytes) noexcept = 0;

 protected:
  Device() = default;
};

// Number of CUDA devices that the driver offers; 0 without CUDA support, driver or GPU. `why` (optional) receives the
// reason, part of a sentence.
int cuda_device_count(std::string* why = nullptr);
// The PCI address of a CUDA device, "0000:17:00.0"; empty if the driver does not say, or without CUDA support.
std::string cuda_bus_id(int ordinal);

}  // namespace hoist::platform
