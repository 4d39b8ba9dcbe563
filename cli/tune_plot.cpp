// SPDX-License-Identifier: Apache-2.0
// The sweep as a picture: one heat map for each pattern, made of rectangles and text, so that any browser shows it.
#include <algorithm>
#include <cmath>
#include <set>

#include <fmt/format.h>

#include <hoist/core/units.hpp>

#include "tune.hpp"

namespace hoist::cli {

namespace {

using measure::kPatterns;
using measure::SettingResult;

constexpr int kCellWidth = 62;
constexpr int kCellHeight = 34;
constexpr int kLeft = 70;  // room for the labels of the rows
constexpr int kTop = 84;   // and of the title
constexpr int kPanelGap = 40;

struct Axes {
  std::vector<std::uint64_t> blocks;
  std::vector<unsigned> depths;
  int panel_width() const { return static_cast<int>(blocks.size()) * kCellWidth; }
  int panel_height() const { return static_cast<int>(depths.size()) * kCellHeight; }
};

Axes axes_of(const measure::SearchResult& search) {
  std::set<std::uint64_t> blocks;
  std::set<unsigned> depths;
  for (const SettingResult& result : search.settings) {
    blocks.insert(result.setting.block_bytes);
    depths.insert(result.setting.queue_depth);
  }
  return {{blocks.begin(), blocks.end()}, {depths.begin(), depths.end()}};
}

template <class T>
int position(const std::vector<T>& values, T value) {
  return static_cast<int>(std::find(values.begin(), values.end(), value) - values.begin());
}

// White to blue; readable in grey too.
std::string colour(double share) {
  const auto mix = [&](int from, int to) {
    return static_cast<int>(std::lround(from + (to - from) * std::clamp(share, 0.0, 1.0)));
  };
  return fmt::format("#{:02x}{:02x}{:02x}", mix(247, 8), mix(251, 81), mix(255, 156));
}

std::string text_at(int x, int y, const std::string& style, const std::string& text) {
  return fmt::format("<text x=\"{}\" y=\"{}\" {}>{}</text>\n", x, y, style, text);
}

std::string escaped(const std::string& text) {
  std::string result;
  for (const char c : text) {
    switch (c) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      default:
        result += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
  }
  return result;
}

std::string cell(const SettingResult& result, bool chosen, double speed, double share, int x, int y) {
  std::string svg =
      fmt::format("<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"{}\"{}>", x, y, kCellWidth - 2,
                  kCellHeight - 2, colour(share), chosen ? " stroke=\"#d62728\" stroke-width=\"3\"" : "");
  svg +=
      fmt::format("<title>{} x {}: {:.2f} GB/s, {} passes{}</title></rect>\n", format_bytes(result.setting.block_bytes),
                  result.setting.queue_depth, speed / 1e9, result.passes, chosen ? ", chosen" : "");
  const std::string style =
      fmt::format("text-anchor=\"middle\" font-size=\"12\" fill=\"{}\"", share > 0.6 ? "#fff" : "#222");
  return svg + text_at(x + kCellWidth / 2 - 1, y + kCellHeight / 2 + 3, style, fmt::format("{:.2f}", speed / 1e9));
}

std::string panel(const measure::SearchResult& search, const Axes& axes, std::size_t pattern, int left) {
  double fastest = 0;
  double slowest = 1e300;
  for (const SettingResult& result : search.settings) {
    if (result.passes == 0) continue;
    fastest = std::max(fastest, result.bytes_per_second[pattern]);
    slowest = std::min(slowest, result.bytes_per_second[pattern]);
  }
  std::string svg = text_at(left + axes.panel_width() / 2, kTop - 26, "text-anchor=\"middle\" font-size=\"14\"",
                            fmt::format("{}, GB/s", measure::pattern_name(kPatterns[pattern])));
  for (std::size_t i = 0; i < axes.blocks.size(); ++i) {
    svg += text_at(left + static_cast<int>(i) * kCellWidth + kCellWidth / 2, kTop - 8,
                   "text-anchor=\"middle\" font-size=\"11\"", format_bytes(axes.blocks[i]));
  }
  for (std::size_t i = 0; i < search.settings.size(); ++i) {
    const SettingResult& result = search.settings[i];
    if (result.passes == 0) continue;
    const double speed = result.bytes_per_second[pattern];
    const double share = fastest > slowest ? (speed - slowest) / (fastest - slowest) : 1;
    svg += cell(result, i == search.best, speed, share,
                left + position(axes.blocks, result.setting.block_bytes) * kCellWidth,
                kTop + position(axes.depths, result.setting.queue_depth) * kCellHeight);
  }
  return svg;
}

}  // namespace

std::string to_svg(const TuneReport& report) {
  const measure::SearchResult& search = report.full ? *report.full : report.search;
  measure::SearchResult shown = search;
  shown.best = report.search.best;
  const Axes axes = axes_of(shown);
  const int count = static_cast<int>(kPatterns.size());
  const int width = kLeft + count * axes.panel_width() + (count - 1) * kPanelGap + 20;
  const int height = kTop + axes.panel_height() + 50;
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" viewBox=\"0 0 {0} {1}\" "
      "font-family=\"sans-serif\">\n<rect width=\"{0}\" height=\"{1}\" fill=\"#fff\"/>\n",
      width, height);
  svg += text_at(kLeft, 26, "font-size=\"16\"",
                 escaped(fmt::format("hoist tune: {} ({})", fmt::join(report.paths, ", "), report.engine)));
  for (std::size_t i = 0; i < axes.depths.size(); ++i) {
    svg += text_at(kLeft - 10, kTop + static_cast<int>(i) * kCellHeight + kCellHeight / 2 + 3,
                   "text-anchor=\"end\" font-size=\"11\"", fmt::format("{} deep", axes.depths[i]));
  }
  for (int i = 0; i < count; ++i)
    svg += panel(shown, axes, static_cast<std::size_t>(i), kLeft + i * (axes.panel_width() + kPanelGap));
  svg +=
      text_at(kLeft, kTop + axes.panel_height() + 28, "font-size=\"11\" fill=\"#555\"",
              "Across: block size. Down: blocks in flight on each drive. Red frame: chosen. Darker is faster, within "
              "each panel.");
  return svg + "</svg>\n";
}

}  // namespace hoist::cli
