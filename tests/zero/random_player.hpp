// SPDX-License-Identifier: Apache-2.0
// tests/zero/random_player.hpp - carries out one session of a random program on one rank.
//
// Threading  One thread per rank; what they share is a Journal.
#pragma once

#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "random_program.hpp"

namespace hoist::test {

// The state that outlives a session, which the next one must find.
struct Snapshot {
  std::uint64_t step = 0;
  Digests state;
  double loss_scale = 1;
  int ranks = 1;
  std::map<int, std::string> caller_states;  // by rank
};
struct Journal {
  std::mutex mutex;
  Snapshot last;
  std::map<std::string, Snapshot> kept;
  std::map<std::uint32_t, double> rates;  // that the program set, by group
};

class Abandoned : public std::exception {};

class Player {
 public:
  // Makes the engine: afresh, or from what the last session left. BudgetError comes from here.
  Player(const Program& program, std::size_t session, const ToySetup& setup, Journal& journal,
         const Runtime::MakeCommunicator& join);
  ~Player();

  // Losses are what every rank saw of weights, norms and read state.
  Digests play();

 private:
  struct Unit {
    UnitId id;
    std::vector<ParameterId> parameters;
  };

  using Seen = std::shared_ptr<double>;  // set by a stream
  struct Look {
    std::size_t pass;
    ParameterId parameter;
    Seen sum;
  };

  void allocate_scratch();
  void describe();
  void add_unit(std::size_t index);
  void begin_anew();
  void go_on();
  void restore(const std::string& from);
  void compare(const Snapshot& expected, bool with_state);
  Snapshot snapshot();
  Digests state_digests();
  void set_rates();
  void note(Snapshot& in_journal);
  std::string caller_state(std::uint64_t salt) const;
  std::span<const std::byte> present_caller_state() const { return std::as_bytes(std::span(caller_state_)); }

  void act(const Action& action);
  void pass(const Action& action, Pass kind, int micro_batch);
  void train(const Action& action);
  void visit(std::size_t index, const Action& action, bool backward, int micro_batch);
  void look_at(std::size_t index, const Lease& lease);
  void nest(std::size_t index, const Action& action, bool backward);
  void make_gradients(std::size_t index, const Lease& lease, const Action& action, int micro_batch);
  void make_gradient(UnitId unit, ParameterId parameter, const Lease& lease, const Action& action, std::uint64_t seed);
  bool is_tied_owner(std::size_t index) const;
  void finish_tied_owners();
  Seen look(const Lease& lease, ParameterId parameter);
  void compare_looks();
  void step(std::uint64_t salt);
  void read(std::uint64_t salt);
  void write(std::uint64_t salt);
  void set_rate(std::uint64_t salt);
  void save(std::uint64_t salt);
  void restart(const Action& action);
  void drop_gradients();
  bool can_resume() const;
  bool on_nvme() const;
  ParameterId some_parameter(std::uint64_t salt) const;
  std::vector<State> states_of(ParameterId parameter) const;
  platform::Stream& stream() const { return *streams_[stream_]; }

  const Program& program_;
  const Session& session_;
  const ToySetup& setup_;
  Journal& journal_;
  Runtime runtime_;
  std::vector<tiers::DeviceBlock> scratch_;  // gradients of the program's own, one a stream
  std::vector<std::unique_ptr<platform::Stream>> streams_;
  std::size_t stream_ = 0;
  std::vector<Unit> units_;
  std::vector<Seen> seen_;
  std::vector<Look> looks_;
  std::size_t passes_ = 0;
  Model model_;
  std::optional<Engine> engine_;
  std::vector<Lease> kept_;  // destroyed before the streams
  bool gradients_due_ = false;
  std::size_t visits_left_ = 0;
  std::string caller_state_;  // of the last step that was applied
  std::map<std::uint32_t, double> rates_;
};

}  // namespace hoist::test
