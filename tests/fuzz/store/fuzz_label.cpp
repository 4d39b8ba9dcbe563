// SPDX-License-Identifier: Apache-2.0
// libFuzzer: a drive's label, and the superblock's text of drives, are what this version writes or a StoreError.
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include <hoist/core/error.hpp>
#include <hoist/tests/support/temp_directory.hpp>
#include <hoist/tiers/detail/store_drives.hpp>

namespace {

template <typename Call>
bool refused(const Call& call) {
  try {
    call();
  } catch (const hoist::StoreError& error) {
    if (std::string(error.what()).empty()) std::abort();
    return true;
  }
  return false;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t count) {
  using namespace hoist::tiers;
  static const hoist::test::TempDirectory directory(hoist::test::scratch_in_memory());
  static const hoist::tiers::detail::StorePaths drive(directory.path().string(), 0);
  const std::string text(reinterpret_cast<const char*>(data), count);
  std::ofstream(drive.label, std::ios::binary | std::ios::trunc) << text;
  const hoist::tiers::detail::DriveLabel label{
      .store_number = 7, .drive = 1, .drive_count = 2, .home = "/home/of/store"};
  const bool accepted = !refused([&] { hoist::tiers::detail::check_label(drive, label); });
  if (accepted && !text.starts_with("hoist drive 1 of 2\nstore 0000000000000007\n")) std::abort();
  refused([&] { hoist::tiers::detail::refuse_foreign_data(drive, "/home/of/another", std::nullopt); });
  refused([&] {
    const hoist::tiers::detail::Stripes stripes = hoist::tiers::detail::decode_stripes(text, "manifest");
    if (!text.empty() && stripes.directories.size() + 1 != stripes.layout.drive_count()) std::abort();
  });
  return 0;
}
