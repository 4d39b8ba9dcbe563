// SPDX-License-Identifier: Apache-2.0
// The storage engine for Python: tensors to files and back, many at once.
#include <algorithm>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <unistd.h>

#include <hoist/aio/unaligned.hpp>
#include <hoist/core/owning_process.hpp>
#include <hoist/core/units.hpp>
#include <hoist/platform/host_memory.hpp>

#include "bindings.hpp"
#include "tensor.hpp"

namespace hoist::python {

using namespace nb::literals;

namespace {

// One read or write under way. Keeps its file open, and its tensor alive.
class Transfer {
 public:
  Transfer(std::unique_ptr<aio::StripedFile> file, nb::object tensor, Completion completion,
           std::optional<std::uint64_t> final_bytes)
      : file_(std::move(file), "the transfer"),
        tensor_(std::move(tensor)),
        completion_(std::move(completion)),
        final_bytes_(final_bytes) {}
  ~Transfer() {
    const nb::gil_scoped_release release;
    try {
      completion_.wait();
    } catch (...) {  // whoever wanted to know has asked
    }
    file_ = {nullptr, "the transfer"};
  }

  bool done() const { return completion_.done(); }
  void wait() {
    completion_.wait();
    if (!final_bytes_) return;
    // The last sector was written whole; the file is as long as what was written.
    const std::string path = file_->file(0).path();
    if (truncate(path.c_str(), static_cast<off_t>(*std::exchange(final_bytes_, std::nullopt))) != 0)
      throw IoError({.operation = "truncate", .path = path, .code = errno}, "the tail of the file is zeros");
  }

 private:
  InOneProcess<aio::StripedFile> file_;
  nb::object tensor_;
  Completion completion_;
  std::optional<std::uint64_t> final_bytes_;
};

class AioEngine {
 public:
  AioEngine(std::uint64_t block_bytes, unsigned queue_depth, unsigned threads, const std::string& backend)
      : queue_(std::make_unique<Queue>(aio::DriveQueueOptions{.backend = backend_named(backend),
                                                              .block_bytes = block_bytes,
                                                              .queue_depth = queue_depth,
                                                              .thread_count = threads}),
               "the engine") {}

  std::shared_ptr<Transfer> read(const Array& target, const std::string& path, std::uint64_t offset) {
    nb::object tensor = nb::cast(target, nb::rv_policy::reference);
    const std::span bytes(static_cast<std::byte*>(target.data()), target.nbytes());
    const nb::gil_scoped_release release;
    auto file = std::make_unique<aio::StripedFile>(queue_->drive, aio::File(path, {.mode = aio::OpenMode::read_only}));
    const Completion completion = is_aligned(bytes.data(), bytes.size(), offset)
                                      ? file->read(offset, bytes, aio::Priority::foreground)
                                      : queue_->unaligned.read(*file, offset, bytes, aio::Priority::foreground);
    const nb::gil_scoped_acquire acquire;
    return std::make_shared<Transfer>(std::move(file), std::move(tensor), completion, std::nullopt);
  }

  std::shared_ptr<Transfer> write(const ConstArray& source, const std::string& path, std::uint64_t offset) {
    nb::object tensor = nb::cast(source, nb::rv_policy::reference);
    const std::span bytes(static_cast<const std::byte*>(source.data()), source.nbytes());
    const nb::gil_scoped_release release;
    std::error_code missing;
    const std::uint64_t before = std::filesystem::file_size(path, missing);
    auto file = std::make_unique<aio::StripedFile>(
        queue_->drive, aio::File(path, {.mode = missing ? aio::OpenMode::create : aio::OpenMode::read_write}));
    const std::uint64_t end = offset + bytes.size();
    const bool longer = missing || end > before;
    const Completion completion = is_aligned(bytes.data(), bytes.size(), offset)
                                      ? file->write(offset, bytes, aio::Priority::foreground)
                                      : queue_->unaligned.write(*file, offset, bytes, aio::Priority::foreground);
    const nb::gil_scoped_acquire acquire;
    return std::make_shared<Transfer>(std::move(file), std::move(tensor), completion,
                                      longer && end % aio::File::kAlignment != 0 ? std::optional(end) : std::nullopt);
  }

  const std::string& description() const { return queue_.get()->drive.description(); }

 private:
  static aio::BackendKind backend_named(const std::string& name) {
    if (name == "automatic") return aio::BackendKind::automatic;
    if (name == "io_uring") return aio::BackendKind::io_uring;
    if (name == "threads") return aio::BackendKind::threads;
    throw UsageError("no backend is called '" + name + "': automatic, io_uring or threads");
  }
  static bool is_aligned(const void* data, std::uint64_t bytes, std::uint64_t offset) {
    return (reinterpret_cast<std::uintptr_t>(data) | bytes | offset) % aio::File::kAlignment == 0;
  }

  struct Queue {
    explicit Queue(const aio::DriveQueueOptions& options)
        : drive(options), unaligned({.bounce_bytes = 16 * kMiB, .piece_bytes = kMiB}) {}
    aio::DriveQueue drive;
    aio::Unaligned unaligned;
  };
  InOneProcess<Queue> queue_;
};

}  // namespace

void bind_aio(nb::module_& module) {
  const auto no_gil = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<Transfer>(module, "Transfer", "A read or write under way: a future.")
      .def("done", &Transfer::done)
      .def("wait", &Transfer::wait, no_gil, "Blocks, without the GIL; raises IoError when it failed.");

  nb::class_<AioEngine>(module, "AioEngine", "Many direct reads and writes in flight.")
      .def(nb::init<std::uint64_t, unsigned, unsigned, const std::string&>(), "block_bytes"_a = kMiB,
           "queue_depth"_a = 16, "threads"_a = 4, "backend"_a = "automatic")
      .def("read", &AioEngine::read, "target"_a, "path"_a, "offset_bytes"_a = 0, nb::keep_alive<0, 1>(),
           "Starts filling a CPU tensor from a file. Memory at multiples of 4 KiB is read into directly.")
      .def("write", &AioEngine::write, "source"_a, "path"_a, "offset_bytes"_a = 0, nb::keep_alive<0, 1>(),
           "Starts writing a CPU tensor to a file, which is made when it does not exist.")
      .def_prop_ro("description", &AioEngine::description);

  module.def(
      "aligned_memory",
      [](std::uint64_t bytes) {
        auto* memory = new platform::HostMemory({.bytes = bytes});
        const nb::capsule owner(memory, [](void* p) noexcept { delete static_cast<platform::HostMemory*>(p); });
        const std::size_t count = bytes;
        return nb::ndarray<nb::device::cpu, std::uint8_t, nb::shape<-1>>(memory->bytes().data(), {count}, owner);
      },
      "bytes"_a, "Memory fit for direct transfers, in huge pages where the system has them.");
}

}  // namespace hoist::python
