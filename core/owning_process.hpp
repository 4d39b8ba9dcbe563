// SPDX-License-Identifier: Apache-2.0
// core/owning_process.hpp - objects that work only in the process that made them.
//
// fork() copies an object's memory but none of its threads. In the child a call would wait for a thread that does not
// exist, and so would the destructor. There, calls are UsageErrors and destructors do nothing.
//
// Threading  Any thread.
#pragma once

#include <memory>
#include <utility>

namespace hoist {

// Remembers the process that makes it. Cost of a check: one load.
class OwningProcess {
 public:
  OwningProcess() noexcept;
  bool is_this() const noexcept;
  // Errors: UsageError in a process that was forked later; `what` names the object.
  void require_this(const char* what) const;

 private:
  unsigned forks_;  // before this process, since the program began
};

// Remembers memory that is never freed, so that leak checkers find a pointer to it: an object of another process, or
// memory that a stuck thread or the kernel may still write to.
void leave_unfreed(const void* memory) noexcept;

// A std::unique_ptr for an object that belongs to one process.
template <typename Object>
class InOneProcess {
 public:
  // `what` names the object in errors, and lives as long as this.
  InOneProcess(std::unique_ptr<Object> object, const char* what) : object_(std::move(object)), what_(what) {}
  InOneProcess(InOneProcess&&) noexcept = default;
  InOneProcess& operator=(InOneProcess&& other) noexcept {
    if (this == &other) return *this;
    end();
    object_ = std::move(other.object_);
    what_ = other.what_;
    process_ = other.process_;
    return *this;
  }
  ~InOneProcess() { end(); }

  bool is_usable() const noexcept { return process_.is_this(); }
  // Errors: UsageError in another process.
  Object* operator->() const { return &**this; }
  Object& operator*() const {
    process_.require_this(what_);
    return *object_;
  }
  // Without the check, for what another process may read.
  Object* get() const noexcept { return object_.get(); }

 private:
  void end() noexcept {
    if (object_ && !process_.is_this()) leave_unfreed(object_.release());
    object_.reset();
  }

  OwningProcess process_;
  std::unique_ptr<Object> object_;
  const char* what_;
};

}  // namespace hoist
