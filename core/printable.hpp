// SPDX-License-Identifier: Apache-2.0
// core/printable.hpp - text that came from a file or the environment, made safe for a terminal.
//
// A name in a store or a safetensors file may hold escape sequences that clear the screen, forge output or change a
// terminal's title. Every exception's text (core/error.hpp), every line of the log (core/log.hpp) and everything that
// the programs print passes through printable().
#pragma once

#include <string>
#include <string_view>

namespace hoist {

// The text with each control character (C0 but '\n', DEL, C1) and each byte that is not UTF-8 as "\x1b". Text that is
// already printable stays as it is, so it may pass through here more than once.
std::string printable(std::string_view text);

// Whether the text holds a control character: line feeds too. Names with such characters are refused.
bool has_control_characters(std::string_view text);
// Such a text for the error that refuses it: each line feed as "\x0a". The error shows the other control characters so.
std::string on_one_line(std::string text);

}  // namespace hoist
