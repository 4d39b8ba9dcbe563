// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <optional>
#include <string>

#include <gtest/gtest.h>

#include <hoist/core/completion.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/owning_process.hpp>
#include <hoist/tests/support/forked.hpp>

namespace hoist::test::owning_process_test {
namespace {

struct Counted {
  explicit Counted(int& count) : ended(count) {}
  ~Counted() { ++ended; }
  int value = 7;
  int& ended;
};

TEST(OwningProcess, AnObjectWorksWhereItWasMade) {
  int ended = 0;
  {
    InOneProcess<Counted> object(std::make_unique<Counted>(ended), "the object");
    EXPECT_EQ(object->value, 7);
    InOneProcess<Counted> moved = std::move(object);
    EXPECT_EQ(moved->value, 7);
    moved = InOneProcess<Counted>(std::make_unique<Counted>(ended), "the object");
    EXPECT_EQ(ended, 1);
  }
  EXPECT_EQ(ended, 2);
}

TEST(OwningProcess, InAForkedProcessCallsAreRefusedAndTheDestructorDoesNothing) {
  int ended = 0;
  std::optional<InOneProcess<Counted>> object(std::in_place, std::make_unique<Counted>(ended), "the object");
  const int code = exit_code_of_fork([&] {
    if (object->is_usable()) return 1;
    try {
      return (*object)->value;
    } catch (const UsageError& error) {
      if (std::string(error.what()).find("forked from the one that made the object") == std::string::npos) return 2;
    }
    object.reset();
    int own = 0;
    { const InOneProcess<Counted> mine(std::make_unique<Counted>(own), "the child's"); }
    return ended == 0 && own == 1 ? 0 : 3;
  });
  EXPECT_EQ(code, 0);
  EXPECT_EQ((*object)->value, 7);
}

TEST(OwningProcess, AForkedProcessDoesNotWaitForWhatIsPending) {
  Promise promise;
  const Completion pending = promise.completion();
  EXPECT_EQ(exit_code_of_fork([&] {
              try {
                pending.wait();
              } catch (const UsageError&) {
                return 0;
              }
              return 1;
            }),
            0);
  promise.complete();
  EXPECT_EQ(exit_code_of_fork([&] {
              pending.wait();
              return 0;
            }),
            0);
}

}  // namespace
}  // namespace hoist::test::owning_process_test
