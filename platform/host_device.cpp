// SPDX-License-Identifier: Apache-2.0
// The host device: CPU memory that behaves like a GPU's, so that a program that is wrong on a GPU is wrong here too.
#include <algorithm>
#include <cstring>
#include <map>
#include <optional>

#include <fmt/format.h>

#include <hoist/core/assert.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/mutex.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/core/units.hpp>
#include <hoist/platform/detail/backends.hpp>
#include <hoist/platform/detail/guard.hpp>
#include <hoist/platform/detail/host_stream.hpp>
#include <hoist/platform/detail/mapping.hpp>
#include <hoist/platform/topology.hpp>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define HOIST_FORBID(data, bytes) __asan_poison_memory_region(data, bytes)
#define HOIST_ALLOW(data, bytes) __asan_unpoison_memory_region(data, bytes)
#else
#define HOIST_FORBID(data, bytes) static_cast<void>(0)
#define HOIST_ALLOW(data, bytes) static_cast<void>(0)
#endif

namespace hoist::platform::detail {

namespace {

constexpr int kNaNByte = 0xFF;  // all bits set is a NaN in bf16, fp16, fp32 and fp64

MappingOptions mapping_options(const DeviceOptions& options) {
  return {.memory = {.bytes = options.memory_bytes, .numa_nodes = options.numa_nodes, .touch_cpus = options.touch_cpus},
          .touch = false,
          .tier = "device",
          .key = "the device memory budget"};
}

class HostDevice final : public Device {
 public:
  explicit HostDevice(const DeviceOptions& options) : options_(options), mapping_(mapping_options(options)) {
    if (!options_.host.host_accessible) guard(memory());
  }

  ~HostDevice() override {
    HOIST_ASSERT(streams_alive_ == 0, "{} streams outlive their device: they end before their Runtime",
                 streams_alive_.load());
    HOIST_ALLOW(mapping_.committed().data(), mapping_.committed().size());
  }

  DeviceKind kind() const override { return DeviceKind::host; }

  std::string description() const override {
    return fmt::format("host device (CPU memory, {})", counted(Topology::detect().core_count(), "core"));
  }

  std::span<std::byte> memory() override { return mapping_.bytes(); }
  bool host_accessible() const override { return options_.host.host_accessible; }

  void released(std::span<std::byte> bytes) override {
    expect_inside(bytes);
    if (!options_.host.poison) return;
    const GuardedAccess access;
    HOIST_ALLOW(bytes.data(), bytes.size());
    poison(bytes);
    HOIST_FORBID(bytes.data(), bytes.size());
  }

  void acquired(std::span<std::byte> bytes) override {
    expect_inside(bytes);
    HOIST_ALLOW(bytes.data(), bytes.size());
    const GuardedAccess access;
    const MutexLock lock(mutex_);
    const auto end = static_cast<std::uint64_t>(bytes.data() + bytes.size() - memory().data());
    mapping_.commit_up_to(end, options_.host.poison ? std::optional(std::byte{kNaNByte}) : std::nullopt);
  }

  std::unique_ptr<Stream> create_stream(std::string name) override {
    const std::uint64_t index = streams_created_.fetch_add(1);
    const std::uint64_t seed = options_.host.chaos_seed;
    return std::make_unique<HostStream>(HostStreamOptions{.name = std::move(name),
                                                          .ledger = options_.ledger,
                                                          .chaos_seed = seed == 0 ? 0 : random_bits(seed, index) | 1,
                                                          .link_bytes_per_second = options_.host.link_bytes_per_second,
                                                          .guarded = !options_.host.host_accessible,
                                                          .alive = &streams_alive_});
  }

  std::unique_ptr<Stream> borrow_stream(void*, std::string name) override {
    throw UsageError(fmt::format(
        "stream '{}' cannot be borrowed: the host device has no native streams; call create_stream instead", name));
  }

  // Any memory works for copies here. Registrations are recorded so that a mistake shows before the program runs on a
  // GPU.
  void register_host(std::span<std::byte> bytes) override {
    if (bytes.empty()) return;
    MutexLock lock(mutex_);
    const auto after = registered_.lower_bound(bytes.data());
    const bool overlaps = (after != registered_.end() && after->first < bytes.data() + bytes.size()) ||
                          (after != registered_.begin() && std::prev(after)->second > bytes.data());
    if (overlaps) {
      throw DeviceError("register_host", 0, "the memory is registered already", "register each block once");
    }
    registered_.emplace(bytes.data(), bytes.data() + bytes.size());
  }

  void unregister_host(std::span<std::byte> bytes) noexcept override {
    if (bytes.empty()) return;
    MutexLock lock(mutex_);
    const auto found = registered_.find(bytes.data());
    HOIST_ASSERT(found != registered_.end() && found->second == bytes.data() + bytes.size(),
                 "{} bytes at {} were never registered", bytes.size(), static_cast<void*>(bytes.data()));
    registered_.erase(found);
  }

 private:
  static void poison(std::span<std::byte> bytes) {
    if (!bytes.empty()) std::memset(bytes.data(), kNaNByte, bytes.size());
  }

  void expect_inside(std::span<std::byte> bytes) {
    const std::span<std::byte> all = memory();
    HOIST_ASSERT(
        bytes.empty() || (bytes.data() >= all.data() && bytes.data() + bytes.size() <= all.data() + all.size()),
        "{} bytes at {} do not belong to the device", bytes.size(), static_cast<void*>(bytes.data()));
  }

  const DeviceOptions options_;
  Mapping mapping_;
  std::atomic<int> streams_alive_{0};
  std::atomic<std::uint64_t> streams_created_{0};
  Mutex mutex_;
  std::map<std::byte*, std::byte*> registered_ HOIST_GUARDED_BY(mutex_);  // begin -> end
};

}  // namespace

std::unique_ptr<Device> create_host_device(const DeviceOptions& options) {
  return std::make_unique<HostDevice>(options);
}

}  // namespace hoist::platform::detail
