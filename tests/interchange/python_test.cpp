// SPDX-License-Identifier: Apache-2.0
// Both directions against the reference: what we write, Python's safetensors package reads, and the other way round.
#include <gtest/gtest.h>

#include <hoist/interchange/safetensors_reader.hpp>
#include <hoist/tests/support/python.hpp>
#include <hoist/tests/support/temp_directory.hpp>

#include "safetensors_files.hpp"

namespace hoist::interchange::python_test {
namespace {

using test::tensor;

class SafetensorsPython : public ::testing::Test {
 protected:
  void SetUp() override { HOIST_NEEDS_PYTHON(directory_.path().string(), "safetensors, numpy"); }

  int run(const std::string& program) const { return test::run_python(directory_.path().string(), program); }

  test::TempDirectory directory_;
};

TEST_F(SafetensorsPython, ReadsWhatWeWrite) {
  std::vector<float> f32(60);
  std::vector<std::uint16_t> narrow(24);
  for (std::size_t i = 0; i < f32.size(); ++i) f32[i] = 0.1f * static_cast<float>(i);
  for (std::size_t i = 0; i < narrow.size(); ++i) narrow[i] = static_cast<std::uint16_t>(0x3c00 + 17 * i);
  test::save(directory_ / "m",
             {tensor("first", TensorType::f32, {3, 4, 5}, f32),
              tensor("scalar", TensorType::f32, {}, std::vector<float>{-2.5f}),
              tensor("half \u00fc", TensorType::f16, {24}, narrow), tensor("brain", TensorType::bf16, {2, 12}, narrow),
              tensor("empty", TensorType::f16, {0, 3}, std::vector<float>{})},
             250);
  EXPECT_EQ(run(R"(
import json, struct, numpy as np
from safetensors import safe_open, deserialize
index = json.load(open("m/model.safetensors.index.json"))
assert index["metadata"]["total_size"] == 60 * 4 + 4 + 48 + 48, index
assert len(set(index["weight_map"].values())) == 2, index
def get(name):
    with safe_open("m/" + index["weight_map"][name], framework="np") as f:
        assert f.metadata() == {"format": "pt"}, f.metadata()
        return f.get_tensor(name)
first = get("first")
assert first.shape == (3, 4, 5) and first.dtype == np.float32
assert (first.ravel() == (np.float32(0.1) * np.arange(60, dtype=np.float32))).all()
assert get("scalar").shape == () and get("scalar") == np.float32(-2.5)
assert get("half ü").dtype == np.float16
bits = (0x3c00 + 17 * np.arange(24)).astype(np.uint16)
assert (get("half ü").view(np.uint16) == bits).all()
assert get("empty").shape == (0, 3)
# numpy has no bfloat16 of its own; the raw bytes are the same either way.
raw = dict(deserialize(open("m/" + index["weight_map"]["brain"], "rb").read()))["brain"]
assert raw["dtype"] == "BF16" and raw["shape"] == [2, 12], raw
assert bytes(raw["data"]) == bits.tobytes()
)"),
            0);
}

TEST_F(SafetensorsPython, WritesWhatWeRead) {
  ASSERT_EQ(run(R"(
import numpy as np
from safetensors.numpy import save_file
save_file({"w": np.arange(12, dtype=np.float32).reshape(3, 4) / 7, "h": np.arange(5, dtype=np.float16),
           "ids": np.arange(3, dtype=np.int64), "flag": np.array([True, False])}, "p.safetensors",
          metadata={"format": "np", "of": "ü"})
)"),
            0);
  const SafetensorsModel model(directory_ / "p.safetensors");
  EXPECT_EQ(model.metadata().at("of"), "\u00fc");
  EXPECT_EQ(model.tensors().size(), 4u);
  EXPECT_EQ(model.find("ids")->info->type, TensorType::i64);
  EXPECT_EQ(model.find("flag")->info->type, TensorType::boolean);
  std::vector<float> w(12);
  model.find("w")->read(0, std::as_writable_bytes(std::span(w)));
  for (std::size_t i = 0; i < w.size(); ++i) EXPECT_EQ(w[i], static_cast<float>(i) / 7);
}

}  // namespace
}  // namespace hoist::interchange::python_test
