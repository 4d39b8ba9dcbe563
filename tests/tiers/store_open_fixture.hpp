// SPDX-License-Identifier: Apache-2.0
// tests/tiers/store_open_fixture.hpp - one rank's store of a small model, and with which sentence it is refused.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/tests/tiers/store_harness.hpp>

namespace hoist::tiers::test {

class StoreOpenTest : public ::testing::Test {
 protected:
  StoreOpenTest() : options_(small_model(directory_ / "a/b/store")) {}

  std::unique_ptr<Store> create() { return create_store(options_, *queue_); }
  void make_committed(std::uint64_t last_step = 1) {
    const auto store = create();
    for (std::uint64_t step = 0; step <= last_step; ++step) run_step(*store, options_, step, all_records(options_));
  }
  std::string file(const char* ending) const { return options_.directory + "/rank-00000." + ending; }
  // The sentence with which opening or creating is refused.
  std::string refusal_to_open() const {
    return refusal([&] { open_store(options_, *queue_); });
  }
  std::string refusal_to_create() const {
    return refusal([&] { create_store(options_, *queue_); });
  }
  template <typename Call>
  static std::string refusal(const Call& call) {
    try {
      call();
    } catch (const StoreError& error) {
      return error.what();
    } catch (const std::exception& error) {
      return std::string("not a StoreError: ") + error.what();
    }
    return "not refused";
  }
  std::map<std::string, std::vector<std::byte>> contents() const {
    std::map<std::string, std::vector<std::byte>> files;
    for (const auto& entry : std::filesystem::directory_iterator(options_.directory))
      if (entry.path().extension() != ".lock-info") files[entry.path()] = read_file(entry.path());
    return files;
  }

  hoist::test::TempDirectory directory_;
  StoreOptions options_;
  std::unique_ptr<aio::DriveQueue> queue_ = clean_queue();
};

}  // namespace hoist::tiers::test
