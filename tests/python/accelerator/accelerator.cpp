// SPDX-License-Identifier: Apache-2.0
// A PyTorch device for tests: CPU memory, and operators that run later, on streams of hoist's host device.
//
// As on a GPU, an operator returns before it has run, on the calling thread's current stream; streams know nothing of
// each other but what events say; and autograd runs the backward pass on a thread of its own. Streams delay their work
// at random. Memory is filled with NaN when it is taken and when it is freed, and freed in the order of the stream that
// it was taken on. So a missing wait in hoist shows in a result.
//
// Each operator is inferred on meta tensors, which gives the outputs, and enqueued as the CPU's operator on tensors
// over the same memory. What cannot be inferred (results that depend on data) runs at once, after the stream has caught
// up.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pthread.h>
#include <torch/extension.h>

#include "inference.hpp"
#include "ranks.hpp"

namespace {

using namespace accelerator;

// --- streams ---------------------------------------------------------------------------------------------------------

// HostStream's, by address.
struct Functions {
  void (*launch)(void* stream, void (*run)(void* work), void* work) = nullptr;
  void (*synchronize)(void* stream) = nullptr;
  void* (*record)(void* stream) = nullptr;
  void (*wait)(void* stream, const void* event) = nullptr;
  bool (*reached)(const void* event) = nullptr;
  void (*forget)(void* event) = nullptr;
};
Functions functions;

struct Lane {
  void* stream = nullptr;
  std::mt19937_64 delays;  // of the stream's thread, like the next
  std::chrono::nanoseconds busy{0};
};
std::vector<Lane> lanes;  // by a stream's number in PyTorch; 0 is the default stream
thread_local c10::StreamId current = 0;
std::atomic<std::size_t> next_of_pool{0};
std::atomic<std::uint64_t> waits{0};  // how often the program has waited for a stream
// Set when the program is about to end or was forked and has no streams: every operator then runs at once.
std::atomic<bool> ended{false};

std::mutex marks_mutex;
std::vector<std::pair<int, std::int64_t>> marks;  // numbers, and when a stream came to them

std::mutex error_mutex;
std::exception_ptr error;  // the first of an operator, for the next call that waits

Lane& lane(c10::StreamId number) { return lanes.at(static_cast<std::size_t>(number)); }

void delay_at_times(Lane& here) {
  if (here.delays() % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(here.delays() % 1000));
}

void enqueue(c10::StreamId number, std::function<void()> work) {
  struct Task {
    Lane* lane;
    std::function<void()> work;
  };
  if (ended) return work();
  functions.launch(
      lane(number).stream,
      [](void* p) {
        const std::unique_ptr<Task> task(static_cast<Task*>(p));
        const auto begin = std::chrono::steady_clock::now();
        delay_at_times(*task->lane);
        try {
          task->work();
        } catch (...) {
          const std::lock_guard lock(error_mutex);
          if (!error) error = std::current_exception();
        }
        task->lane->busy += std::chrono::steady_clock::now() - begin;
      },
      new Task{&lane(number), std::move(work)});
}

void synchronize(c10::StreamId number) {
  if (ended) return;
  ++waits;
  if (PyGILState_Check() != 0) {
    const pybind11::gil_scoped_release release;  // an operator's last tensor may need it
    functions.synchronize(lane(number).stream);
  } else {
    functions.synchronize(lane(number).stream);
  }
  const std::lock_guard lock(error_mutex);
  if (error) std::rethrow_exception(std::exchange(error, nullptr));
}

void synchronize_all() {
  for (std::size_t number = 0; number < lanes.size(); ++number) synchronize(static_cast<c10::StreamId>(number));
}

// --- memory ----------------------------------------------------------------------------------------------------------

struct Block {
  void* data;
  std::size_t bytes;
  c10::StreamId taken_on;
  std::vector<c10::StreamId> used_on;  // as the program said (Tensor.record_stream)
};

void free_later(void* context) {
  const std::shared_ptr<Block> block(static_cast<Block*>(context));
  for (const c10::StreamId number : block->used_on) {
    if (ended) break;
    void* const used = functions.record(lane(number).stream);
    functions.wait(lane(block->taken_on).stream, used);
    functions.forget(used);
  }
  enqueue(block->taken_on, [block] {
    std::memset(block->data, 0xFF, block->bytes);
    std::free(block->data);
  });
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    const c10::Device device(kDeviceType, 0);
    if (bytes == 0) return {nullptr, device};
    void* data = std::malloc(bytes);
    std::memset(data, 0xFF, bytes);
    return {data, new Block{data, bytes, current, {}}, &free_later, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    std::memcpy(target, source, bytes);
  }
};
Allocator allocator;
REGISTER_ALLOCATOR(kDeviceType, &allocator);

// --- the device ------------------------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDeviceType; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return {kDeviceType, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void synchronizeDevice(const c10::DeviceIndex) const override { synchronize_all(); }

  static c10::Stream of(c10::StreamId number) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDeviceType, 0), number);
  }
  c10::Stream getStream(c10::Device) const override { return of(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return of(0); }
  c10::Stream getNewStream(c10::Device, int) const override {
    return of(static_cast<c10::StreamId>(1 + next_of_pool++ % (lanes.size() - 1)));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return of(std::exchange(current, stream.id())); }
  bool queryStream(const c10::Stream&) const override { return false; }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(stream.id()); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    if (data.get_deleter() == &free_later) static_cast<Block*>(data.get_context())->used_on.push_back(stream.id());
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event != nullptr) functions.forget(*event);
    *event = functions.record(lane(stream.id()).stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) functions.wait(lane(stream.id()).stream, event);
  }
  bool queryEvent(void* event) const override { return event == nullptr || functions.reached(event); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event != nullptr) functions.forget(event);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// The device's own generator, for operators that are given none. An operator draws numbers when it runs, in the order
// of its stream.
const at::Generator& generator() {
  static const at::Generator own = at::detail::createCPUGenerator();
  return own;
}

// Generators of this device. They are the CPU's, so only this list tells them from those of the CPU.
std::mutex generators_mutex;
std::vector<at::Generator> generators;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    const std::lock_guard lock(generators_mutex);
    return generators.emplace_back(at::detail::createCPUGenerator());
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t bytes) const override {
    synchronize(current);
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), bytes);
  }
};
[[maybe_unused]] const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

// --- operators -------------------------------------------------------------------------------------------------------

// Returns the index of the argument that the operator writes to and returns as this result; -1 for a new tensor.
int aliased_argument(const c10::FunctionSchema& schema, std::size_t result) {
  const c10::AliasInfo* info = schema.returns()[result].alias_info();
  if (info == nullptr) return -1;
  for (std::size_t a = 0; a < schema.arguments().size(); ++a) {
    const c10::AliasInfo* other = schema.arguments()[a].alias_info();
    if (other != nullptr && other->beforeSets() == info->beforeSets()) return static_cast<int>(a);
  }
  return -1;
}

// An argument like `out`, which only takes a result. The CPU's operator gets an empty tensor in its place: some resize
// theirs on the way (mse_loss), which memory of another tensor cannot be.
bool is_out(const c10::FunctionSchema& schema, int argument) {
  return argument >= 0 && schema.arguments()[static_cast<std::size_t>(argument)].is_out();
}

// Like a GPU's operators, these draw only from generators of the device. randperm is an exception: PyTorch's samplers
// call it with the CPU's generator, and tests with samplers run with this device as the default.
void give_generator(const c10::OperatorHandle& op, torch::jit::Stack& work) {
  const auto& arguments = op.schema().arguments();
  for (std::size_t a = 0; a < arguments.size(); ++a) {
    const auto optional = arguments[a].type()->cast<c10::OptionalType>();
    if (!optional || optional->getElementType()->kind() != c10::TypeKind::GeneratorType) continue;
    if (work[a].isNone()) {
      work[a] = generator();
      continue;
    }
    if (op.schema().name() == "aten::randperm") continue;
    const std::lock_guard lock(generators_mutex);
    TORCH_CHECK(work[a].toGenerator() == generator() ||
                    std::ranges::find(generators, work[a].toGenerator()) != generators.end(),
                "Expected a '", kDeviceType, "' device type for generator but found 'cpu'");
  }
}

// Like a GPU's operators, these accept CPU tensors as numbers (without dimensions) and as indices, but no other CPU
// tensors beside tensors of the device.
void refuse_cpu_tensors(const c10::OperatorHandle& op, const torch::jit::Stack& arguments) {
  bool some_here = false, some_on_cpu = false;
  const auto look = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    some_here = some_here || is_on_device(tensor);
    some_on_cpu = some_on_cpu || (tensor.device().is_cpu() && tensor.dim() > 0);
  };
  for (const c10::IValue& value : arguments) {
    if (value.isTensor()) look(value.toTensor());
    if (value.isTensorList()) std::ranges::for_each(value.toTensorVector(), look);
  }
  TORCH_CHECK(!some_here || !some_on_cpu, "Expected all tensors to be on the same device, but ", op.schema().name(),
              " has some on the CPU and some on '", kDeviceType, "'");
}

void replace_outs(const c10::OperatorHandle& op, torch::jit::Stack& work, std::vector<int>& aliases) {
  for (int& alias : aliases) {
    if (!is_out(op.schema(), alias) || !work[static_cast<std::size_t>(alias)].isTensor()) continue;
    c10::IValue& out = work[static_cast<std::size_t>(alias)];
    out = at::empty({0}, out.toTensor().options());
    alias = -1;  // its values are copied as those of new tensors are
  }
}

// Copies what the CPU's operator made into the tensors that stand for it, as on_cpu() has them.
void copy_results(const torch::jit::Stack& made, const torch::jit::Stack& wanted, const std::vector<int>& aliases) {
  for (std::size_t r = 0; r < wanted.size(); ++r) {
    if (aliases[r] >= 0) continue;
    if (wanted[r].isTensor()) {
      const at::Tensor from = made[r].toTensor(), to = wanted[r].toTensor();
      const bool left_out = from.defined() && from.numel() == 0;  // batch norm's statistics in evaluation, on CPUs
      if (to.defined() && !left_out) to.copy_(from);
    } else if (wanted[r].isTensorList()) {
      const auto from = made[r].toTensorVector(), to = wanted[r].toTensorVector();
      for (std::size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
    }
  }
}

// Resizes the tensors that the operator writes to and that were passed without their final size.
void resize_outputs(const torch::jit::Stack& inferred, const torch::jit::Stack& arguments,
                    const std::vector<int>& aliases) {
  for (std::size_t r = 0; r < inferred.size(); ++r) {
    if (aliases[r] < 0 || !inferred[r].isTensor()) continue;
    const at::Tensor target = arguments[static_cast<std::size_t>(aliases[r])].toTensor();
    if (target.sizes() != inferred[r].toTensor().sizes()) target.resize_(inferred[r].toTensor().sizes());
  }
}

// Converts arguments for CPU operators that want other types than the operators of other devices do.
void convert_for_cpu(const c10::OperatorHandle& op, torch::jit::Stack& work) {
  const auto convert = [&](std::size_t argument, at::ScalarType type) {
    work[argument] = work[argument].toTensor().to(type);
  };
  if (op.schema().name() == "aten::native_layer_norm_backward")
    for (const std::size_t mean : {3, 4}) convert(mean, work[1].toTensor().scalar_type());
  if (op.schema().name() == "aten::histc") convert(0, at::kFloat);
}

void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const std::size_t count = schema.arguments().size();
  const torch::jit::Stack arguments(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
  torch::jit::drop(*stack, count);
  std::vector<int> aliases;
  for (std::size_t r = 0; r < schema.returns().size(); ++r) aliases.push_back(aliased_argument(schema, r));
  refuse_cpu_tensors(op, arguments);

  const at::AutoDispatchBelowADInplaceOrView guard;
  std::optional<torch::jit::Stack> inferred = infer_or_recall(op, arguments);
  if (inferred) resize_outputs(*inferred, arguments, aliases);
  torch::jit::Stack work = changed(arguments, ToCpu{});
  std::vector<int> written_in_place = aliases;
  replace_outs(op, work, written_in_place);
  give_generator(op, work);
  const bool later = inferred.has_value();
  if (!later) {
    synchronize(current);
    convert_for_cpu(op, work);
    op.callBoxed(&work);
    inferred = work;
    resize_outputs(*inferred, arguments, aliases);
  }
  torch::jit::Stack results;
  for (std::size_t r = 0; r < inferred->size(); ++r) {
    if (aliases[r] >= 0) {
      results.push_back(arguments[static_cast<std::size_t>(aliases[r])]);
      continue;
    }
    struct Make {
      at::Tensor operator()(const at::Tensor& t) const { return t.defined() ? like_meta(t) : t; }
      c10::IValue device() const { return {}; }
    };
    results.push_back(with_tensors((*inferred)[r], Make{}));
  }
  const torch::jit::Stack wanted = changed(results, ToCpu{});
  if (later) {
    enqueue(current, [op, work = std::move(work), wanted, written_in_place]() mutable {
      const at::AutoDispatchBelowADInplaceOrView below;
      convert_for_cpu(op, work);
      op.callBoxed(&work);
      copy_results(work, wanted, written_in_place);
    });
  } else {
    copy_results(work, wanted, written_in_place);
  }
  for (c10::IValue& result : results) stack->push_back(std::move(result));
}

const c10::OperatorHandle& operator_of(const char* name) {
  return *new c10::OperatorHandle(c10::Dispatcher::singleton().findSchemaOrThrow(name, ""));
}

// Under the names that convolutions have on devices which PyTorch does not know.
void run_convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static const c10::OperatorHandle& op = operator_of("aten::convolution");
  run(op, stack);
}
void run_convolution_backward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static const c10::OperatorHandle& op = operator_of("aten::convolution_backward");
  const std::int64_t outputs = torch::jit::peek(*stack, 0, 10).toTensor().size(1);
  stack->insert(stack->end() - 7, c10::IValue(std::vector<std::int64_t>{outputs}));  // the bias's extents
  run(op, stack);
}

// The CPU's draws from the CPU's generator.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  const at::Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const auto options = at::TensorOptions().dtype(c10::dtype_or_default(dtype)).device(at::kMeta);
  const at::Tensor meta = at::empty(C10_AS_INTARRAYREF_SLOW(size), options, format);
  return like_meta(meta);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  if (!is_on_device(target)) {
    synchronize(current);
    target.copy_(on_cpu(source));
    return target;
  }
  // Pageable memory may change after the call.
  const at::Tensor from = is_on_device(source) ? on_cpu(source) : source.clone();
  enqueue(current, [from, to = on_cpu(target)] {
    const at::AutoDispatchBelowADInplaceOrView below;
    to.copy_(from);
  });
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (target.sizes() != source.sizes()) target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  synchronize(current);
  return on_cpu(tensor).item();
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("set_.source_Storage_storage_offset",
         TORCH_FN(static_cast<at::Tensor& (*)(at::Tensor&, at::Storage, int64_t, at::IntArrayRef, at::IntArrayRef)>(
             at::native::set_storage_cpu_)));
  m.impl("set_.source_Storage", TORCH_FN(static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(at::native::set_)));
  m.impl("native_dropout", TORCH_FN(native_dropout));
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&run_convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&run_convolution_backward>());
  m.impl("record_stream", [](at::Tensor& self, c10::Stream stream) {
    Guard().recordDataPtrOnStream(self.storage().data_ptr(), stream);
  });
  m.impl("resize_",
         [](const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) -> const at::Tensor& {
           synchronize(current);
           at::native::resize_impl_cpu_(self.unsafeGetTensorImpl(), size, std::nullopt);
           return self;
         });
}

// --- autocast: PyTorch's rules for all devices -----------------------------------------------------------------------

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

#define HOIST_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define HOIST_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define HOIST_FP32_SET_OPT_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define HOIST_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1,
                   m){AT_FORALL_LOWER_PRECISION_FP(HOIST_LOWER_PRECISION) AT_FORALL_FP32(HOIST_FP32)
                          AT_FORALL_FP32_SET_OPT_DTYPE(HOIST_FP32_SET_OPT_DTYPE) AT_FORALL_PROMOTE(HOIST_PROMOTE)}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("start", [](const std::array<std::uintptr_t, 6>& addresses, const std::vector<std::uintptr_t>& streams,
                    std::uint64_t seed) {
    static_assert(sizeof(functions) == sizeof(addresses));
    std::memcpy(&functions, addresses.data(), sizeof(functions));
    pthread_atfork(nullptr, nullptr, [] { ended = true; });
    for (const std::uintptr_t stream : streams)
      lanes.push_back({reinterpret_cast<void*>(stream), std::mt19937_64(seed++), {}});
  });
  m.def("staged", &staged_by);
  m.def("synchronize", [] { synchronize_all(); });
  m.def("manual_seed", [](std::uint64_t seed) {
    synchronize_all();
    at::Generator own = generator();
    own.set_current_seed(seed);
  });
  m.def("get_rng_state", [] {
    synchronize_all();
    return generator().get_state();
  });
  m.def("set_rng_state", [](const at::Tensor& state) {
    synchronize_all();
    at::Generator own = generator();
    own.set_state(state);
  });
  m.def("waits", [] { return waits.load(); });
  m.def("sleep", [](int milliseconds) {
    enqueue(current, [milliseconds] { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); });
  });
  m.def("busy_seconds", [] {  // of the current stream's operators
    synchronize_all();
    return std::chrono::duration<double>(lane(current).busy).count();
  });
  m.def("mark", [](int number) {
    enqueue(current, [number] {
      const auto now = std::chrono::steady_clock::now().time_since_epoch();
      const std::lock_guard lock(marks_mutex);
      marks.emplace_back(number, std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
    });
  });
  m.def("take_marks", [] {
    synchronize_all();
    const std::lock_guard lock(marks_mutex);
    return std::exchange(marks, {});
  });
  m.def("current_stream", [] { return current; });
  m.def("end", [] {
    if (ended) return;
    synchronize_all();
    ended = true;
  });
}
