// SPDX-License-Identifier: Apache-2.0
#include "text.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <span>

#include <fmt/format.h>

#include <hoist/core/digest.hpp>
#include <hoist/core/rng.hpp>

namespace hoist::gpt {

Text Text::load(const std::string& path, int context) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (!std::filesystem::exists(status)) {
    throw BadInputError(fmt::format("there is no text {}: {}", path, std::strerror(error ? error.value() : ENOENT)));
  }
  if (!std::filesystem::is_regular_file(status))
    throw BadInputError(fmt::format("the text {} is not a regular file", path));
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) throw BadInputError(fmt::format("cannot open the text {}: {}", path, std::strerror(errno)));
  std::vector<std::uint8_t> bytes(std::filesystem::file_size(path));
  file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  if (!file) throw BadInputError(fmt::format("cannot read the text {}: it changed or the device failed", path));
  if (bytes.size() < static_cast<std::uint64_t>(context) + 1) {
    throw BadInputError(
        fmt::format("the text {} has {} bytes; a context of {} needs at least {}: give a longer text or a "
                    "smaller --context",
                    path, bytes.size(), context, context + 1));
  }
  return Text(std::move(bytes));
}

Text::Text(std::vector<std::uint8_t> bytes) : bytes_(std::move(bytes)) {
  Digest digest;
  digest.update(std::as_bytes(std::span(bytes_)));
  fingerprint_ = digest.value();
}

Batch Text::batch(const BatchOptions& options) const {
  const auto context = static_cast<std::size_t>(options.context);
  const auto windows = static_cast<std::size_t>(options.batch);
  const std::uint64_t starts = bytes_.size() - context;
  const auto per_step = static_cast<std::uint64_t>(options.batch) * static_cast<std::uint64_t>(options.world_size);
  const std::uint64_t first = options.step * per_step + static_cast<std::uint64_t>(options.rank) * windows;
  Batch batch{std::vector<std::uint8_t>(windows * context), std::vector<std::uint8_t>(windows * context)};
  for (std::size_t w = 0; w < windows; ++w) {
    const std::uint8_t* window = bytes_.data() + random_bits(options.seed, first + w) % starts;
    std::copy_n(window, context, batch.inputs.data() + w * context);
    std::copy_n(window + 1, context, batch.targets.data() + w * context);
  }
  return batch;
}

}  // namespace hoist::gpt
