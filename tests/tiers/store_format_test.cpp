// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <hoist/core/checksum.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/tiers/detail/record_table.hpp>
#include <hoist/tiers/store_format.hpp>

namespace hoist::tiers::store_format_test {
namespace {

using Bytes = std::vector<std::byte>;

Superblock example() {
  Superblock s;
  s.store_number = 0x0123456789ABCDEFull;
  s.rank = 1;
  s.world_size = 4;
  s.tile_elements = 16384;
  s.data_bytes = 1 << 20;
  s.caller_state_bytes_max = 100;
  s.record_count = 2;
  s.tile_count = 3;
  s.geometry_checksum = 42;
  s.layout = "a 2x3 bf16\nb 7 fp32\n";
  return s;
}

Bytes encoded(const Superblock& s) {
  Bytes bytes(s.superblock_bytes());
  encode_superblock(s, bytes);
  return bytes;
}

// Decodes as a reader of the file would.
std::optional<Superblock> decoded(std::span<const std::byte> bytes, std::uint64_t file_bytes, std::string& problem) {
  const auto length = superblock_length(bytes.first(kBlockAlignment), file_bytes, problem);
  if (!length || *length != bytes.size()) return std::nullopt;
  return decode_superblock(bytes, problem);
}

Bytes sealed_slot(const Superblock& s, SlotHeader header) {
  Bytes bytes(s.slot_bytes());
  SlotImage image(bytes, s);
  image.set_record(0, {5, 2, 4096, 8192, 12288, 9});
  image.set_record(1, {0, 1, 0, 4096, 0, 8});
  image.set_checksums(0, std::vector<std::uint64_t>{1, 2, 3, 4});
  image.set_checksums(4, std::vector<std::uint64_t>{5, 0});
  std::memset(image.caller_state_area().data(), 0x5A, header.caller_state_bytes);
  image.seal(header);
  return bytes;
}

TEST(StoreFormat, SuperblockComesBack) {
  Superblock s = example();
  for (const std::size_t layout_bytes :
       {std::size_t{0}, std::size_t{20}, std::size_t{3968}, std::size_t{3969}, std::size_t{100000}}) {
    s.layout.assign(layout_bytes, 'x');
    std::string problem;
    const auto back = decoded(encoded(s), s.manifest_bytes(), problem);
    ASSERT_TRUE(back) << problem;
    EXPECT_EQ(back->store_number, s.store_number);
    EXPECT_EQ(back->rank, s.rank);
    EXPECT_EQ(back->world_size, s.world_size);
    EXPECT_EQ(back->durability, s.durability);
    EXPECT_EQ(back->data_bytes, s.data_bytes);
    EXPECT_EQ(back->caller_state_bytes_max, s.caller_state_bytes_max);
    EXPECT_EQ(back->record_count, s.record_count);
    EXPECT_EQ(back->tile_count, s.tile_count);
    EXPECT_EQ(back->geometry_checksum, s.geometry_checksum);
    EXPECT_EQ(back->layout, s.layout);
    EXPECT_EQ(back->slot_offset(1) % kBlockAlignment, 0u);
    EXPECT_EQ(back->manifest_bytes(), s.superblock_bytes() + 2 * s.slot_bytes());
  }
}

TEST(StoreFormat, EveryFlippedBitOfASuperblockIsNoticed) {
  const Superblock s = example();
  Bytes bytes = encoded(s);
  for (std::size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    std::string problem;
    ASSERT_FALSE(decoded(bytes, s.manifest_bytes(), problem)) << "bit " << bit;
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
  }
}

TEST(StoreFormat, AnotherVersionIsNamed) {
  Bytes bytes = encoded(example());
  std::string problem;
  bytes[16] = std::byte{5};
  EXPECT_FALSE(decoded(bytes, 1 << 20, problem));
  EXPECT_EQ(problem, "it is of format version 5, and this program reads version 4");
  bytes[16] = std::byte{1};
  EXPECT_FALSE(decoded(bytes, 1 << 20, problem));
  EXPECT_EQ(problem, "it is of format version 1, and this program reads version 4");
}

TEST(StoreFormat, RoomForNamedCheckpointsComesBack) {
  Superblock s = example();
  s.checkpoints_max = 5;
  s.extents_per_record = 7;
  const Bytes bytes = encoded(s);
  std::string problem;
  const auto back = decoded(bytes, 1 << 30, problem);
  ASSERT_TRUE(back) << problem;
  EXPECT_EQ(back->checkpoints_max, 5u);
  EXPECT_EQ(back->slot_count(), 8u);
  EXPECT_EQ(back->manifest_bytes(), s.slot_offset(8));
  s.extents_per_record = 6;
  EXPECT_FALSE(decoded(encoded(s), 1 << 30, problem));
  EXPECT_EQ(problem, "it names 5 checkpoints and 6 extents for each record");
}

TEST(StoreFormat, ACheckpointSlotHasItsNameAndNumber) {
  const Superblock s = example();
  const SlotHeader header{{.step = 9, .incarnation = 2, .name = std::string(47, 'n'), .checkpoint_serial = 3}};
  const SlotCheck check = check_slot(sealed_slot(s, header), s);
  ASSERT_EQ(check.state, SlotCheck::State::valid) << check.problem;
  EXPECT_EQ(check.header, header);
}

TEST(StoreFormat, GarbageIsNoSuperblock) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    Rng rng(seed);
    Bytes bytes(kBlockAlignment);
    for (auto& b : bytes) b = static_cast<std::byte>(rng.bits());
    if (seed % 2 == 0) std::memcpy(bytes.data(), encoded(example()).data(), 24);  // magic and version are right
    std::string problem;
    EXPECT_FALSE(decoded(bytes, 1 << 20, problem)) << "seed " << seed;
    EXPECT_FALSE(problem.empty()) << "seed " << seed;
  }
}

TEST(StoreFormat, SlotComesBack) {
  const Superblock s = example();
  for (const std::uint64_t state_bytes : {0u, 1u, 100u}) {
    Bytes bytes = sealed_slot(s, {{.step = 9, .incarnation = 3}, state_bytes});
    const SlotCheck check = check_slot(bytes, s);
    ASSERT_EQ(check.state, SlotCheck::State::valid) << check.problem;
    EXPECT_EQ(check.header.incarnation, 3u);
    EXPECT_EQ(check.header.step, 9u);
    EXPECT_EQ(check.header.caller_state_bytes, state_bytes);
    const SlotImage image(bytes, s);
    EXPECT_EQ(image.record(0).extent, 5u);
    EXPECT_EQ(image.record(0).tile_count, 2u);
    EXPECT_EQ(image.record(0).offset_bytes, 4096u);
    EXPECT_EQ(image.record(0).w_bytes, 8192u);
    EXPECT_EQ(image.record(0).s_bytes, 12288u);
    EXPECT_EQ(image.record(0).generation, 9u);
    EXPECT_EQ(image.record(1).generation, 8u);
    std::vector<std::uint64_t> checksums(6);
    image.checksums(0, checksums);
    EXPECT_EQ(checksums, (std::vector<std::uint64_t>{1, 2, 3, 4, 5, 0}));
  }
}

TEST(StoreFormat, EveryFlippedBitOfACommitIsNoticed) {
  const Superblock s = example();
  Bytes bytes = sealed_slot(s, {{.step = 7, .incarnation = 1}, 33});
  const std::size_t used = kSlotHeaderBytes + 2 * kRecordEntryBytes + 6 * 8 + 33;
  for (std::size_t bit = 0; bit < 8 * used; ++bit) {
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    ASSERT_EQ(check_slot(bytes, s).state, SlotCheck::State::damaged) << "bit " << bit;
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
  }
  EXPECT_EQ(check_slot(bytes, s).state, SlotCheck::State::valid);
}

TEST(StoreFormat, TornSlotsAreDamagedAndUntouchedOnesBlank) {
  Superblock s = example();
  s.caller_state_bytes_max = 20000;
  const Bytes whole = sealed_slot(s, {{.step = 7, .incarnation = 1}, 20000});
  ASSERT_GE(whole.size(), 5 * kBlockAlignment);
  EXPECT_EQ(check_slot(Bytes(s.slot_bytes()), s).state, SlotCheck::State::blank);
  const std::size_t blocks = whole.size() / kBlockAlignment;
  for (std::uint32_t kept = 1; kept + 1 < (1u << blocks); ++kept) {
    Bytes torn(s.slot_bytes());
    for (std::size_t block = 0; block < blocks; ++block)
      if ((kept >> block) & 1)
        std::memcpy(torn.data() + block * kBlockAlignment, whole.data() + block * kBlockAlignment, kBlockAlignment);
    ASSERT_EQ(check_slot(torn, s).state, SlotCheck::State::damaged) << "kept blocks " << kept;
  }
}

TEST(StoreFormat, ACommitOfAnotherStoreIsNotTaken) {
  const Superblock s = example();
  Superblock other = s;
  other.store_number ^= 1;
  EXPECT_EQ(check_slot(sealed_slot(other, {{.step = 7, .incarnation = 1}}), s).problem, "it belongs to another store");
}

TEST(StoreFormat, DurabilityNoneHasNoSlots) {
  Superblock s = example();
  s.durability = Durability::none;
  EXPECT_EQ(s.slot_bytes(), 0u);
  EXPECT_EQ(s.manifest_bytes(), s.superblock_bytes());
  EXPECT_EQ(check_slot({}, s).state, SlotCheck::State::blank);
}

// The numbers of docs/format.md: stores of every form that was ever written are known again.
TEST(StoreFormat, TheGeometryOfEveryFormHasItsNumber) {
  struct Form {
    RecordSegment segment;
    std::uint64_t dtype, number;
  };
  const auto bf16 = [](unsigned moments, MomentType type, RemainderType remainder) {
    return RecordSegment{DType::bf16, true, 64, moments, type, remainder};
  };
  const std::vector<Form> forms{{{DType::bf16, false, 32}, 0, 0},
                                {{DType::bf16, true, 32}, 0, 1},
                                {{DType::fp16, true, 96}, 1, 1},
                                {{DType::fp32, true, 32, 1, MomentType::bf16}, 2, 16 + 2},
                                {{DType::fp32, true, 32, 0}, 2, 4},
                                {bf16(1, MomentType::fp32, RemainderType::int16), 0, 16 + 4},
                                {bf16(2, MomentType::bf16, RemainderType::int16), 0, 32 + 2},
                                {bf16(2, MomentType::fp8, RemainderType::int16), 0, 32 + 1},
                                {bf16(2, MomentType::fp32, RemainderType::int8), 0, 256 + 32 + 4},
                                {bf16(2, MomentType::fp8, RemainderType::int8), 0, 256 + 32 + 1},
                                {bf16(0, MomentType::fp32, RemainderType::int8), 0, 256 + 4}};
  std::vector<StoreRecord> records;
  std::vector<std::uint64_t> words;
  for (const Form& form : forms) {  // each alone, and beside the first
    for (const bool beside : {false, true}) {
      std::vector<RecordSegment> segments{form.segment};
      words.push_back(beside ? 2 : 1);
      words.insert(words.end(), {form.dtype, form.number, form.segment.shard_elements});
      if (beside) {
        segments.push_back(forms[0].segment);
        words.insert(words.end(), {0, 0, 32});
      }
      records.push_back({"unit", RecordLayout(segments)});
    }
  }
  EXPECT_EQ(detail::geometry_checksum(records), checksum(std::as_bytes(std::span(words))));
}

}  // namespace
}  // namespace hoist::tiers::store_format_test
