// SPDX-License-Identifier: Apache-2.0
// tiers/budget.hpp - counts the held bytes of a tier, never more than its budget. Two tiers in the same memory may have
// a common budget beside their own.
//
// Threading  Any thread.
// Errors     take() throws BudgetError naming the configuration key to raise.
#pragma once

#include <cstdint>
#include <string>

#include <hoist/core/mutex.hpp>

namespace hoist::tiers {

class Budget {
 public:
  // `tier` is "device", "pinned", "host" or "nvme"; `key` the configuration key that sets it. Bytes of it are also held
  // in `common`, which outlives it.
  Budget(std::string tier, std::string key, std::uint64_t limit_bytes, Budget* common = nullptr);
  ~Budget();
  Budget(const Budget&) = delete;
  Budget& operator=(const Budget&) = delete;

  // Bytes held until destruction.
  class Hold {
   public:
    Hold() = default;
    Hold(Hold&& other) noexcept;
    Hold& operator=(Hold&& other) noexcept;
    ~Hold();
    std::uint64_t bytes() const { return bytes_; }

   private:
    friend class Budget;
    Hold(Budget* budget, std::uint64_t bytes) : budget_(budget), bytes_(bytes) {}
    Budget* budget_ = nullptr;
    std::uint64_t bytes_ = 0;
  };
  [[nodiscard]] Hold take(std::uint64_t bytes, const std::string& what);

  const std::string& tier() const { return tier_; }
  const std::string& key() const { return key_; }
  std::uint64_t limit_bytes() const { return limit_bytes_; }
  const Budget* common() const { return common_; }
  std::uint64_t free_bytes() const;  // also of the common one
  std::uint64_t held_bytes() const;
  std::uint64_t peak_bytes() const;

 private:
  void give_back(std::uint64_t bytes) noexcept;
  const std::string tier_;
  const std::string key_;
  const std::uint64_t limit_bytes_;
  Budget* const common_;
  mutable Mutex mutex_;
  std::uint64_t held_bytes_ HOIST_GUARDED_BY(mutex_) = 0;
  std::uint64_t peak_bytes_ HOIST_GUARDED_BY(mutex_) = 0;
};

}  // namespace hoist::tiers
