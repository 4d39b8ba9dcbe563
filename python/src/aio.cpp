// SPDX-License-Identifier: Apache-2.0
// The storage engine for Python: tensors to files and back, many at once.
#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <hoist/aio/given_up.hpp>
#include <hoist/aio/unaligned.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/mutex.hpp>
#include <hoist/core/owning_process.hpp>
#include <hoist/core/units.hpp>
#include <hoist/platform/host_memory.hpp>

#include "bindings.hpp"
#include "interruption.hpp"
#include "tensor.hpp"

namespace hoist::python {

using namespace nb::literals;

namespace {

// Tells files apart, by whatever path they are opened.
using FileIdentity = std::pair<dev_t, ino_t>;

std::optional<FileIdentity> identity_of(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) return std::nullopt;
  return FileIdentity{status.st_dev, status.st_ino};
}

// An engine's drive queue. Files that are open keep it.
struct Queue {
  explicit Queue(const aio::DriveQueueOptions& options) : drive(options) {}
  aio::DriveQueue drive;
  aio::Unaligned unaligned;
};

bool is_aligned(const void* data, std::uint64_t bytes, std::uint64_t offset) {
  return (reinterpret_cast<std::uintptr_t>(data) | bytes | offset) % aio::File::kAlignment == 0;
}

// An open file, read and written through one engine's queue.
//
// A write covers whole sectors, so it may go beyond its own last byte. When no write is under way any more, the file is
// cut back to its length.
class OpenFile {
 public:
  OpenFile(std::shared_ptr<Queue> queue, const std::string& path, aio::OpenMode mode)
      : OpenFile(std::move(queue), aio::File(path, {.mode = mode})) {}

  Completion read(std::uint64_t offset, std::span<std::byte> target) {
    return is_aligned(target.data(), target.size(), offset)
               ? file_.read(offset, target, aio::Priority::foreground)
               : queue_->unaligned.read(file_, offset, target, aio::Priority::foreground);
  }

  // Pre: this object is not destroyed before the returned completion is done.
  Completion write(std::uint64_t offset, std::span<const std::byte> source) {
    {
      const MutexLock lock(mutex_);
      if (under_way_ == 0) bytes_ = size_bytes();
      ++under_way_;
    }
    Completion written;
    try {
      written = is_aligned(source.data(), source.size(), offset)
                    ? file_.write(offset, source, aio::Priority::foreground)
                    : queue_->unaligned.write(file_, offset, source, aio::Priority::foreground);
    } catch (...) {
      end_write(0);
      throw;
    }
    const auto promise = std::make_shared<Promise>();
    Completion done = promise->completion();
    written.then([this, promise, end = offset + source.size()](std::exception_ptr error) {
      try {
        end_write(error ? 0 : end);
      } catch (...) {
        if (!error) error = std::current_exception();
      }
      promise->settle(std::move(error));
    });
    return done;
  }

 private:
  OpenFile(std::shared_ptr<Queue> queue, aio::File file)
      : queue_(std::move(queue)), descriptor_(file.descriptor()), file_(queue_->drive, std::move(file)) {}

  std::uint64_t size_bytes() const {
    struct stat status {};
    if (::fstat(descriptor_, &status) != 0)
      throw IoError({.operation = "fstat", .path = file_.file(0).path(), .code = errno});
    return static_cast<std::uint64_t>(status.st_size);
  }

  // `end_bytes`: where the write ended; 0 if it failed.
  void end_write(std::uint64_t end_bytes) {
    const MutexLock lock(mutex_);
    bytes_ = std::max(bytes_, end_bytes);
    if (--under_way_ > 0) return;
    const std::uint64_t size = size_bytes();
    // Only the rest of the last sector is cut off: what lies behind it, another process has written.
    if (size <= bytes_ || size > round_up(bytes_, aio::File::kAlignment)) return;
    if (::ftruncate(descriptor_, static_cast<off_t>(bytes_)) != 0)
      throw IoError({.operation = "truncate", .path = file_.file(0).path(), .code = errno},
                    "the tail of the file is zeros");
  }

  const std::shared_ptr<Queue> queue_;
  const int descriptor_;
  Mutex mutex_;
  std::uint64_t bytes_ HOIST_GUARDED_BY(mutex_) = 0;  // of the file, without the rests of sectors; while under_way_ > 0
  unsigned under_way_ HOIST_GUARDED_BY(mutex_) = 0;
  aio::StripedFile file_;
};

// The files that are being written. Writes to one file that are under way at the same time may share sectors, so they
// go through one OpenFile: that of the engine whose write began first, so through its queue.
class WrittenFiles {
 public:
  // Makes the file if it does not exist.
  std::shared_ptr<OpenFile> open(const std::shared_ptr<Queue>& queue, const std::string& path) {
    const MutexLock lock(mutex_);
    std::erase_if(files_, [](const auto& entry) { return entry.second.expired(); });
    const std::optional<FileIdentity> known = identity_of(path);
    if (known) {
      if (const auto found = files_.find(*known); found != files_.end())
        if (std::shared_ptr<OpenFile> file = found->second.lock()) return file;
    }
    auto file = std::make_shared<OpenFile>(queue, path, known ? aio::OpenMode::read_write : aio::OpenMode::create);
    if (const std::optional<FileIdentity> made = identity_of(path)) files_[*made] = file;
    return file;
  }

 private:
  Mutex mutex_;
  std::map<FileIdentity, std::weak_ptr<OpenFile>> files_ HOIST_GUARDED_BY(mutex_);
};

// The files of this process; a forked one has its own. Never destroyed. Pre: the GIL is held.
WrittenFiles& written_files() {
  const auto fresh = [] { return InOneProcess(std::make_unique<WrittenFiles>(), "the files that are written"); };
  static auto* const files = new InOneProcess<WrittenFiles>(fresh());
  if (!files->is_usable()) *files = fresh();
  return **files;
}

// One read or write under way. Keeps its file open, and its tensor alive.
class Transfer {
 public:
  Transfer(std::shared_ptr<OpenFile> file, nb::object tensor, Completion completion)
      : file_(std::make_unique<std::shared_ptr<OpenFile>>(std::move(file)), "the transfer"),
        tensor_(std::move(tensor)),
        completion_(std::move(completion)) {}
  ~Transfer() {
    const nb::gil_scoped_release release;
    completion_.wait_quietly();  // a caller that waited has received its error
    file_ = {nullptr, "the transfer"};
    if (!aio::a_drive_was_given_up()) return;
    const nb::gil_scoped_acquire acquire;
    leave_unfreed(tensor_.release().ptr());  // a drive that answers late may still write there
  }

  bool done() const { return completion_.done(); }
  void wait() { wait_for(completion_); }

 private:
  InOneProcess<std::shared_ptr<OpenFile>> file_;
  nb::object tensor_;
  Completion completion_;
};

class AioEngine {
 public:
  AioEngine(std::uint64_t block_bytes, unsigned queue_depth, unsigned threads, const std::string& backend)
      : queue_(std::make_unique<std::shared_ptr<Queue>>(
                   std::make_shared<Queue>(aio::DriveQueueOptions{.backend = backend_named(backend),
                                                                  .block_bytes = block_bytes,
                                                                  .queue_depth = queue_depth,
                                                                  .thread_count = threads})),
               "the engine") {}

  std::shared_ptr<Transfer> read(const Array& target, const std::string& path, std::uint64_t offset) {
    nb::object tensor = nb::cast(target, nb::rv_policy::reference);
    const std::span bytes(static_cast<std::byte*>(target.data()), target.nbytes());
    const nb::gil_scoped_release release;
    auto file = std::make_shared<OpenFile>(*queue_, path, aio::OpenMode::read_only);
    const Completion completion = file->read(offset, bytes);
    const nb::gil_scoped_acquire acquire;
    return std::make_shared<Transfer>(std::move(file), std::move(tensor), completion);
  }

  std::shared_ptr<Transfer> write(const ConstArray& source, const std::string& path, std::uint64_t offset) {
    nb::object tensor = nb::cast(source, nb::rv_policy::reference);
    const std::span bytes(static_cast<const std::byte*>(source.data()), source.nbytes());
    WrittenFiles& files = written_files();
    const nb::gil_scoped_release release;
    std::shared_ptr<OpenFile> file = files.open(*queue_, path);
    const Completion completion = file->write(offset, bytes);
    const nb::gil_scoped_acquire acquire;
    return std::make_shared<Transfer>(std::move(file), std::move(tensor), completion);
  }

  const std::string& description() const { return (*queue_.get())->drive.description(); }

 private:
  static aio::BackendKind backend_named(const std::string& name) {
    if (name == "automatic") return aio::BackendKind::automatic;
    if (name == "io_uring") return aio::BackendKind::io_uring;
    if (name == "threads") return aio::BackendKind::threads;
    throw UsageError("no backend is called '" + name + "': automatic, io_uring or threads");
  }

  InOneProcess<std::shared_ptr<Queue>> queue_;
};

}  // namespace

void bind_aio(nb::module_& module) {
  nb::class_<Transfer>(module, "Transfer", "A read or write under way: a future.")
      .def("done", &Transfer::done)
      .def("wait", &Transfer::wait, "Blocks, without the GIL; raises IoError when it failed.");

  nb::class_<AioEngine>(module, "AioEngine", "Many direct reads and writes in flight.")
      .def(nb::init<std::uint64_t, unsigned, unsigned, const std::string&>(), "block_bytes"_a = kMiB,
           "queue_depth"_a = 16, "threads"_a = 4, "backend"_a = "automatic")
      .def("read", &AioEngine::read, "target"_a.noconvert(), "path"_a, "offset_bytes"_a = 0, nb::keep_alive<0, 1>(),
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
