// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <cerrno>
#include <cstdio>

#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <hoist/tests/support/system_calls.hpp>

namespace hoist::test {

namespace {

std::atomic<SystemCallObserver*> current{nullptr};

template <typename Function>
Function* system_version(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

std::string path_of(int descriptor) {
  std::string path(4096, '\0');
  const ssize_t length = ::readlink(fmt::format("/proc/self/fd/{}", descriptor).c_str(), path.data(), path.size());
  path.resize(length < 0 ? 0 : static_cast<std::size_t>(length));
  return path;
}

template <typename Call>
int observed(const SystemCall& call, const Call& make) {
  SystemCallObserver* const observer = current.load();
  if (!observer->before(call)) return 0;
  const int result = make();
  const int code = errno;
  observer->after(call, result);
  errno = code;
  return result;
}

}  // namespace

SystemCallObserver* observe_system_calls(SystemCallObserver* observer) { return current.exchange(observer); }

}  // namespace hoist::test

// These definitions replace the C library's in this program.
extern "C" {

int fsync(int descriptor) {
  using namespace hoist::test;
  static auto* const next = system_version<int(int)>("fsync");
  if (current.load() == nullptr) return next(descriptor);
  return observed({SystemCall::Kind::sync, path_of(descriptor), {}}, [&] { return next(descriptor); });
}

int rename(const char* from, const char* to) noexcept {
  using namespace hoist::test;
  static auto* const next = system_version<int(const char*, const char*)>("rename");
  if (current.load() == nullptr) return next(from, to);
  return observed({SystemCall::Kind::rename, from, to}, [&] { return next(from, to); });
}

int fallocate(int descriptor, int mode, off_t offset, off_t length) {
  using namespace hoist::test;
  static auto* const next = system_version<int(int, int, off_t, off_t)>("fallocate");
  if (current.load() == nullptr) return next(descriptor, mode, offset, length);
  return observed({SystemCall::Kind::allocate, path_of(descriptor), {}},
                  [&] { return next(descriptor, mode, offset, length); });
}

int mkdir(const char* path, mode_t mode) noexcept {
  using namespace hoist::test;
  static auto* const next = system_version<int(const char*, mode_t)>("mkdir");
  if (current.load() == nullptr) return next(path, mode);
  return observed({SystemCall::Kind::make_directory, path, {}}, [&] { return next(path, mode); });
}

int unlink(const char* path) noexcept {
  using namespace hoist::test;
  static auto* const next = system_version<int(const char*)>("unlink");
  if (current.load() == nullptr) return next(path);
  return observed({SystemCall::Kind::remove, path, {}}, [&] { return next(path); });
}

int remove(const char* path) noexcept {  // what std::filesystem::remove calls
  using namespace hoist::test;
  static auto* const next = system_version<int(const char*)>("remove");
  if (current.load() == nullptr) return next(path);
  return observed({SystemCall::Kind::remove, path, {}}, [&] { return next(path); });
}

}  // extern "C"
