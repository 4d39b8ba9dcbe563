// SPDX-License-Identifier: Apache-2.0
// python/src/window.hpp - where a unit's gathered weights appear to PyTorch: one address range for each unit, for ever.
//
// Autograd saves views of weights (the transpose that a linear layer multiplied with) and reads them in the backward
// pass, when the unit has been down and up again. So a unit always comes up at the same addresses, and parameters are
// tensors over its window from the start. Only the memory behind a window comes and goes: an open window has pages of
// its own; a closed one shows not-a-number, whatever its length out of a few MiB that all closed windows share, so that
// a use of weights that are not up is a NaN in the loss and neither a crash nor a plausible wrong number.
//
// Threading  One thread at a time.
// Memory     Open windows and spare pages together stay within the budget. Pages of a closed window are kept for the
//            next window of the same length (they are moved, neither copied nor cleared).
// Errors     BudgetError from open(), IoError when the system has no memory or address space.
// Main path  open -> (the engine copies weights in) -> close -> the pages are spare -> open of another window.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace hoist::python {

class Windows;

class Window {
 public:
  ~Window();
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  std::byte* data() const { return data_; }
  std::uint64_t bytes() const { return bytes_; }
  bool is_open() const { return open_; }

 private:
  friend class Windows;
  explicit Window(std::uint64_t bytes);
  std::byte* data_ = nullptr;
  std::uint64_t bytes_ = 0;  // whole pages
  bool open_ = false;
};

class Windows {
 public:
  // `total_bytes`: of all windows that will be made, about.
  Windows(std::uint64_t budget_bytes, std::uint64_t total_bytes);
  ~Windows();
  Windows(const Windows&) = delete;
  Windows& operator=(const Windows&) = delete;

  // A closed window. Tensors may keep it beyond this object's life.
  std::shared_ptr<Window> make(std::uint64_t bytes);
  // Pre: closed, and fits(). The contents are undefined.
  void open(Window& window);
  void close(Window& window);

  bool fits(std::uint64_t bytes) const { return open_bytes_ + bytes <= budget_bytes_; }
  std::uint64_t budget_bytes() const { return budget_bytes_; }
  std::uint64_t open_bytes() const { return open_bytes_; }
  std::uint64_t peak_bytes() const { return peak_bytes_; }  // open and spare

 private:
  struct Spare {
    std::byte* data;
    std::uint64_t bytes;
  };
  void show_nothing(std::byte* data, std::uint64_t bytes) const;
  void drop_spare();

  const std::uint64_t budget_bytes_;
  std::uint64_t poison_bytes_;
  int poison_ = -1;  // a file in memory, all NaN
  bool can_move_ = true;
  std::vector<Spare> spares_;
  std::uint64_t spare_bytes_ = 0;
  std::uint64_t open_bytes_ = 0;
  std::uint64_t peak_bytes_ = 0;
};

}  // namespace hoist::python
