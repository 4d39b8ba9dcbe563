// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <system_error>

#include <fmt/format.h>

#include <hoist/core/assert.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/printable.hpp>
#include <hoist/core/units.hpp>

namespace hoist {

std::string errno_text(int code) { return std::generic_category().message(code); }

Error::Error(const std::string& sentence) : std::runtime_error(printable(sentence)) {}

namespace detail {

void assertion_failed(const char* expression, const char* file, int line, const std::string& values) {
  std::fprintf(stderr, "hoist: assertion failed: %s (%s:%d)%s%s\n", expression, file, line, values.empty() ? "" : ": ",
               printable(values).c_str());
  std::fflush(stderr);
  std::abort();
}

}  // namespace detail

ConfigError::ConfigError(std::string key_path, const std::string& problem)
    : Error(key_path.empty() ? problem : fmt::format("{}: {}", key_path, problem)), key(std::move(key_path)) {}

BudgetError::BudgetError(Need n)
    : Error(fmt::format("the {} budget of {} ({} bytes) is too small: {} ({} bytes) are needed for {}; raise {} to at "
                        "least {}",
                        n.tier, format_bytes(n.have_bytes), n.have_bytes, format_bytes(n.need_bytes), n.need_bytes,
                        n.detail, n.key, n.need_bytes)),
      need(std::move(n)) {}

BudgetError::BudgetError(Need n, const std::string& sentence) : Error(sentence), need(std::move(n)) {}

BudgetError BudgetError::machine(Need n) {
  if (n.have_bytes >= n.need_bytes) {
    const std::string sentence =
        fmt::format("the system refused {} ({} bytes) of {} memory for {}, although as much is free; lower {}",
                    format_bytes(n.need_bytes), n.need_bytes, n.tier, n.detail, n.key);
    return BudgetError(std::move(n), sentence);
  }
  const std::string sentence = fmt::format(
      "this machine offers {} ({} bytes) of {} memory, but {} ({} bytes) are needed for {}; lower {} or free memory",
      format_bytes(n.have_bytes), n.have_bytes, n.tier, format_bytes(n.need_bytes), n.need_bytes, n.detail, n.key);
  return BudgetError(std::move(n), sentence);
}

namespace {

// Only transfers have an offset; open, flush and rename concern a whole file.
std::string place_of(const IoError::Where& w) {
  if (w.offset_bytes == 0 && w.length_bytes == 0) return {};
  return fmt::format(" at offset {} ({} bytes)", w.offset_bytes, w.length_bytes);
}

}  // namespace

const char* usual_remedy(int code) noexcept {
  switch (code) {
    case EIO:
      return "check the drive's health (dmesg, smartctl)";
    case ENOSPC:
      return "free space on this drive, or choose another directory";
    case EDQUOT:
      return "raise the quota, or choose another directory";
    case EFBIG:
      return "raise the limit of file sizes (ulimit -f), or choose another file system";
    case EROFS:
      return "this file system is mounted read-only: mount it for writing (dmesg says whether it failed), or choose "
             "another path";
    case EACCES:
    case EPERM:
      return "choose a path that this user may use";
    case EMFILE:
      return "raise the limit of open files (ulimit -n)";
    case ENFILE:
      return "raise the system's limit of open files (sysctl fs.file-max)";
    case ENOMEM:
      return "free memory on this machine";
    case ENAMETOOLONG:
      return "choose a shorter path";
    case ELOOP:
      return "name the real path: symbolic links are not followed here, or lead in a circle";
    case ESTALE:
      return "the network file system has lost it: mount it again";
    default:
      return "";
  }
}

IoError::IoError(Where w, const std::string& remedy)
    : Error([&] {
        std::string advice = remedy.empty() ? usual_remedy(w.code) : remedy;
        if (w.code == ENOSPC && (w.operation == "open" || w.operation == "create" || w.operation == "mkdir"))
          advice += " (a drive with space left lacks inodes: df -i)";
        return fmt::format("{} of {}{} failed: {}{}{}", w.operation, w.path, place_of(w),
                           w.code == 0 ? "fewer bytes were transferred than asked for" : errno_text(w.code),
                           advice.empty() ? "" : "; ", advice);
      }()),
      where(std::move(w)) {}

CorruptionError::CorruptionError(Where w, const std::string& remedy)
    : Error(fmt::format("corrupt {} of unit '{}' in {} at offset {}: checksum {:016x} was recorded, {:016x} was found; "
                        "the data was not used{}{}",
                        w.region, w.unit, w.path, w.offset_bytes, w.expected, w.found, remedy.empty() ? "" : "; ",
                        remedy)),
      where(std::move(w)) {}

DeviceError::DeviceError(const std::string& call, int error_code, const std::string& description,
                         const std::string& remedy)
    : Error(fmt::format("{} failed: {} (code {}){}{}", call, description, error_code, remedy.empty() ? "" : "; ",
                        remedy)),
      code(error_code) {}

std::string text_of(const std::exception_ptr& error) noexcept {
  try {
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& known) {
      return known.what();
    } catch (...) {
      return "an exception of unknown type";
    }
  } catch (const std::bad_alloc&) {
    return "out of memory";  // short enough for std::string to need no allocation
  }
}

std::exception_ptr current_failure() {
  try {
    throw;
  } catch (const UsageError& error) {
    return std::make_exception_ptr(Error(error.what()));
  } catch (const BudgetError& error) {
    return std::make_exception_ptr(Error(error.what()));
  } catch (...) {
    return std::current_exception();
  }
}

}  // namespace hoist
