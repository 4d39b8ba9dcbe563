// SPDX-License-Identifier: Apache-2.0
// tests/support/forwarding_stream.hpp - a stream that passes every call on to another one: the base of those that
// change a few of them.
//
// Threading  As platform::Stream.
#pragma once

#include <functional>
#include <string_view>
#include <utility>

#include <hoist/platform/stream.hpp>
#include <hoist/platform/update_arrays.hpp>

namespace hoist::test {

class ForwardingStream : public platform::Stream {
 public:
  std::string_view name() const override { return inner_.name(); }
  platform::StreamEvent record() override { return inner_.record(); }
  void wait(const platform::StreamEvent& event, WaitCause cause) override { inner_.wait(event, cause); }
  void copy(std::byte* target, const std::byte* source, std::uint64_t bytes, platform::CopyKind kind) override {
    inner_.copy(target, source, bytes, kind);
  }
  void fill(std::byte* target, std::uint8_t value, std::uint64_t bytes) override { inner_.fill(target, value, bytes); }
  void scale_into(std::byte* target, DType target_dtype, const std::byte* source, DType source_dtype,
                  std::uint64_t count, float scale, Combine combine) override {
    inner_.scale_into(target, target_dtype, source, source_dtype, count, scale, combine);
  }
  void sums_of_squares(double* partial, const std::byte* source, DType dtype, std::uint64_t count) override {
    inner_.sums_of_squares(partial, source, dtype, count);
  }
  void update(const UpdateFactors& factors, const platform::UpdateArrays& arrays) override {
    inner_.update(factors, arrays);
  }
  void launch(std::string_view what, std::function<void()> work) override { inner_.launch(what, std::move(work)); }
  void synchronize() override { inner_.synchronize(); }
  std::function<void(CountIdle)> watch_idle() override { return inner_.watch_idle(); }
  void* native() const override { return inner_.native(); }
  bool capturing() const override { return inner_.capturing(); }

 protected:
  explicit ForwardingStream(platform::Stream& inner) : inner_(inner) {}

 private:
  platform::Stream& inner_;
};

}  // namespace hoist::test
