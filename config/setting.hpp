// SPDX-License-Identifier: Apache-2.0
// config/setting.hpp - the keys of a configuration with the values in effect: for programs that show them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include <hoist/config/key_table.hpp>

namespace hoist {

// A key and the value in effect, in the order of the key table. Includes hints and neutral values of refused keys.
struct ConfigSetting {
  enum class Source : std::uint8_t {
    file,
    standard,   // the default
    automatic,  // "auto", which is the default
  };
  const config::KeyRow* row = nullptr;
  config::Value value;
  Source source = Source::standard;
  std::size_t line = 0;  // 0 unless the file names the key
  std::size_t column = 0;
};
std::string to_text(const config::Value& value);  // JSON text, "" for no value

}  // namespace hoist
