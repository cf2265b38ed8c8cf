// The intercepts and the table of them; sync_hooks.h tells in which order a step passes them.
#include "step/sync_hooks.h"

#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "features/auto_donors.h"
#include "features/backward_threads.h"
#include "features/graph_wiring.h"
#include "features/outdated_tensors.h"
#include "features/whole_overwrites.h"
#include "features/would_be.h"
#include "step/parameter_order.h"

namespace torch_xla_donate {

namespace {

using abi::Executor;

HookCallbacks& Callbacks() {
  static HookCallbacks* callbacks = new HookCallbacks();
  return *callbacks;
}

struct SwitchedOff {
  std::mutex mutex;
  Reason reason;
};
SwitchedOff& TheSwitch() {
  static SwitchedOff* value = new SwitchedOff();
  return *value;
}

// ---- The originals ----

Original run_post_order, async_constructor, lazy_tensor_constructor, current_data_handle, create_tensor_node,
    for_all_device_contexts, tensor_collection_barrier, mark_step, completer;

// torch_xla's one executor, once it has passed a barrier.
std::atomic<const lazy::LazyGraphExecutor*> host_executor{nullptr};

// ---- What one thread's step knows ----

// An info that a parameter carries only while the executor computes the donor set and compiles.
struct RewrittenInfo {
  lazy::BackendDataPtr buffer;
  std::shared_ptr<lazy::BackendData::Info> ours;
  std::shared_ptr<lazy::BackendData::Info> before;
};

struct StepInProgress {
  StepPtr step;  // null if it has no donors of ours, and outputs have moved
  // Under SPMD, where the outcome alone tells which donors are of use: those of the choice, in its order.
  AutoAnswer sharded;
  std::vector<DonorPtr> sharded_donors;
  std::vector<RewrittenInfo> rewritten;
  MovedOutputs moved;  // until the step is scheduled
  bool compiled = false;
  Executor::Async* run = nullptr;

  bool IsRunBy(const lazy::MultiWait* runner) const { return run != nullptr && &run->mwait == runner; }

  void GiveInfosBack() {
    for (RewrittenInfo& info : rewritten) {
      if (info.buffer->info() == info.ours.get()) {
        info.buffer->SetInfo(std::move(info.before));
      }
    }
    rewritten.clear();
  }

  // The step has run.
  void Learn() const {
    std::vector<std::size_t> of_no_use;
    for (std::size_t i = 0; i < sharded_donors.size(); ++i) {
      if (sharded_donors[i]->state == DonorState::kUnusable) {
        of_no_use.push_back(sharded.choice->parameters[i]);
      }
    }
    if (!of_no_use.empty()) {
      AutoPlans::Get().OfNoUse(sharded.plan, of_no_use);
    }
  }

  void Abandon(const Reason& why) {
    GiveInfosBack();
    ReleaseOutputs(moved);
    if (step != nullptr) {
      DonationRegistry::Get().Abandon(step, why);
    }
  }

  ~StepInProgress() {
    GiveInfosBack();
    ReleaseOutputs(moved);
  }
};

// What the next run of a compiled graph will consume.
struct ArmedRun {
  std::shared_ptr<const CallSite> call;
  std::vector<RunDonor> donors;
  std::string graph;
};

// What the program keeps of a spared buffer after an op has used it: the node by which the next op would pass unseen.
struct Reused {
  std::weak_ptr<abi::TensorData> tensor;
  const lazy::BackendData* buffer;
};

std::atomic<bool> debug_process{false};
std::atomic<bool> one_of_many{false};  // other processes run the same program

// Automatic donation: the wish of the process, how many wishes for it there are in all, and whether it can be had.
std::atomic<bool> auto_default{false};
std::atomic<int> auto_wishes{0};
struct AutoObstacle {
  std::atomic<bool> asked{false};
  std::atomic<bool> known{false};
  Reason reason;  // written before it is known, and never again
};
AutoObstacle& TheAutoObstacle() {
  static AutoObstacle* value = new AutoObstacle();
  return *value;
}

// Asks whether it can be had, once. Nobody waits for the answer: whoever asks takes the GIL, which others may hold
// here.
bool AutoObstacleKnown() {
  AutoObstacle& obstacle = TheAutoObstacle();
  if (!obstacle.asked.exchange(true)) {
    try {
      obstacle.reason = Callbacks().prepare_auto();
    } catch (...) {
      obstacle.asked.store(false);
      throw;
    }
    obstacle.known.store(true, std::memory_order_release);
  }
  return obstacle.known.load(std::memory_order_acquire);
}

// Whether any hook has something to look for. Two loads where there is nothing.
bool Watching() { return DonationRegistry::Armed() || auto_wishes.load(std::memory_order_relaxed) > 0; }

// A tensor of the executor's list.
struct Listed {
  std::weak_ptr<abi::TensorData> tensor;
  const abi::TensorData* data;      // the same for comparing, never followed
  const lazy::BackendData* buffer;  // what it held then, likewise
};

struct ThreadState {
  std::optional<ArmedRun> armed;
  // What OrderParameters() asks for, and what came of it.
  std::optional<std::unordered_set<const lazy::BackendData*>> ordered_donors;
  std::vector<OrderedParameter> ordered_parameters;
  // A run is to be described instead.
  bool inspecting = false;
  Executor::Async* inspected_run = nullptr;
  std::optional<abi::CompiledGraph> inspected;
  // Inside of ForAllDeviceContexts: the live tensors are being listed.
  bool listing = false;
  // Whether a list is kept. Decided when it begins: a mark that another thread makes meanwhile waits for the next step.
  bool noting = false;
  // The live tensors in the executor's order, how many of them have been asked for what they hold, and how many
  // questions have followed.
  std::vector<Listed> list;
  std::int64_t newest = 0;  // the last id among them
  void* arena = nullptr;    // of the executor, which has made the list
  std::size_t asked = 0;
  std::size_t asked_again = 0;
  // The executor waits for parameters that are still being computed by passing the barrier inside of RunPostOrder.
  bool in_post_order = false;
  bool expected = false;  // the registry has a step for the run that comes next
  bool recorded = false;  // the registry has a step for the graph that RunPostOrder() has passed last
  bool listed = false;    // the live tensors, and no graph has been made of them yet
  // Of the step that begins; see backward_threads.h.
  bool after_backward_thread = false;
  std::shared_ptr<StepInProgress> current;
  int disabled = 0, reporting = 0, checking = 0;
  std::vector<bool> auto_donates;  // the wishes of this thread's contexts
  bool refusing_runs = false;
  std::uint64_t barriers = 0;
  std::uint64_t runs = 0;
  std::optional<lazy::BackendDevice> last_device;
  std::optional<WouldBe> would_be;
  const lazy::MultiWait* would_be_runner = nullptr;
  std::uint64_t last_spared = 0;  // the last step, if it has spared donors
  std::vector<Reused> reused;
  bool telling = false;  // inside of the reuse callback, which may use tensors itself

  bool Reporting() const { return reporting > 0 || debug_process.load(std::memory_order_relaxed); }
  bool Checking() const { return checking > 0 || debug_process.load(std::memory_order_relaxed); }

  // Whoever has made a list (a step, dynamo, a debug report) goes through it from its beginning to its end, each tensor
  // once, and must not be disturbed. A step then asks each of its outputs, which hold nothing, once more. Anybody else
  // reads a tensor, and the list is of no use any more.
  bool BelongsToList(const lazy::LazyTensor& tensor, bool holds_data) {
    if (asked < list.size() && tensor.data().get() == list[asked].data) {
      ++asked;
      return true;
    }
    if (holds_data) {
      return false;
    }
    // A tensor whose whole graph is device data gets that for its handle on the way, which asks it once more.
    const abi::TensorData& data = *tensor.data();
    if (asked > 0 && &data == list[asked - 1].data && abi::BufferOf(data) != nullptr) {
      return true;
    }
    if (asked == list.size()) {
      ++asked_again;
      return true;
    }
    return false;
  }

  // Whether a graph with so many outputs is that of the step that made the list: a partial sync that came upon the list
  // of somebody else would have asked its tensors twice.
  bool ListIsOfStep(std::size_t outputs) const { return noting && asked == list.size() && asked_again < 2 * outputs; }

  void DropList() {
    noting = false;
    list.clear();
    newest = 0;
    asked = asked_again = 0;
  }
};

ThreadState& State() {
  thread_local ThreadState state;
  return state;
}

// A step that was claimed on this thread and never reached its end, because the host threw in between.
void AbandonLeftover(ThreadState& state) {
  if (state.current != nullptr) {
    std::shared_ptr<StepInProgress> leftover = std::move(state.current);
    state.current = nullptr;
    leftover->Abandon(ReasonCode::kGivenUp);
  }
}

// An op that comes next shall make a node of its own, and so pass CreateTensorNode.
void ForgetReused(ThreadState& state) {
  for (const Reused& reused : state.reused) {
    const std::shared_ptr<abi::TensorData> tensor = reused.tensor.lock();
    if (tensor != nullptr && tensor->handle.get() == reused.buffer) {
      tensor->ir_value = lazy::Value();
    }
  }
  state.reused.clear();
}

// ---- Choosing the donors of a step ----

// The tensors that will hold the step's outputs, in output order; empty if they cannot be told for certain.
// The executor has just cleared the graph of each (a placeholder will follow), so an output is a live tensor at one of
// the collection's indices that holds nothing.
std::vector<const abi::TensorData*> OutputsOf(const std::vector<std::shared_ptr<abi::TensorData>>& live,
                                              const Executor::SyncTensorCollection& collection, std::size_t roots) {
  if (collection.indices.size() != roots) {
    return {};
  }
  std::vector<const abi::TensorData*> outputs;
  outputs.reserve(roots);
  for (std::size_t index : collection.indices) {
    const abi::TensorData* data = index < live.size() ? live[index].get() : nullptr;
    if (data == nullptr || data->handle != nullptr || data->ir_value) {
      return {};
    }
    outputs.push_back(data);
  }
  return outputs;
}

struct Candidate {
  lazy::BackendDataPtr buffer;
  DonorPtr donor;
  Reason refusal;  // empty: may be donated
};

// Refuses each donor whose buffer somebody else would miss: a live tensor that nobody offered, or a view made since the
// tensor was marked.
void RefuseSharedBuffers(const std::vector<std::shared_ptr<abi::TensorData>>& live,
                         std::vector<Candidate>& candidates) {
  if (candidates.empty()) {
    return;
  }
  std::unordered_map<const lazy::BackendData*, Candidate*> by_buffer;
  for (Candidate& candidate : candidates) {
    by_buffer.emplace(candidate.buffer.get(), &candidate);
  }
  for (const std::shared_ptr<abi::TensorData>& data : live) {
    if (data == nullptr || data->handle == nullptr) {
      continue;
    }
    auto found = by_buffer.find(data->handle.get());
    if (found == by_buffer.end()) {
      continue;
    }
    if (abi::HasView(*data)) {
      found->second->refusal = ReasonCode::kHasViews;
    } else if (!found->second->donor->HeldBy(data.get())) {
      found->second->refusal = ReasonCode::kHeldByOthers;
    }
  }
}

// From here on a use of the tensor passes CreateTensorNode or CurrentDataHandle: an op would otherwise go on with the
// graph node it has, and a read with the host's copy of the value.
void ForgetCachedValues(const Donor& donor, const lazy::BackendData* buffer) {
  for (const Holder& holder : donor.holders) {
    const std::shared_ptr<abi::TensorData> tensor = holder.tensor.lock();
    if (tensor != nullptr && tensor->handle.get() == buffer) {
      tensor->ir_value = lazy::Value();
      tensor->tensor_data.reset();
    }
  }
}

// `order` are the parameters that a step with donation would have put first.
void NoteWouldBe(ThreadState& state, const Executor::PostOrderData& graph,
                 const Executor::SyncTensorCollection* collection, const std::vector<DonorPtr>& spared,
                 const abi::OutputIds& ids, const std::vector<std::size_t>& order, std::uint64_t step) {
  std::unordered_map<const lazy::BackendData*, DonorPtr> donor_of;
  for (const DonorPtr& donor : spared) {
    donor_of.emplace(donor->buffer.lock().get(), donor);
  }
  WouldBe would_be(collection, step);
  std::vector<bool> added(graph.parameters_data.size());
  const auto add = [&](std::size_t i) {
    const lazy::BackendData& parameter = *graph.parameters_data[i];
    const auto found = donor_of.find(&parameter);
    if (!added[i] && (ids.ReplacementOf(parameter).has_value() || found != donor_of.end())) {
      would_be.Add(parameter, found != donor_of.end() ? found->second : nullptr);
    }
    added[i] = true;
  };
  std::for_each(order.begin(), order.end(), add);
  for (std::size_t i = 0; i < added.size(); ++i) {
    add(i);
  }
  state.would_be = std::move(would_be);
}

// The step will run, and its outputs are known.
void SpareDonors(ThreadState& state, Executor::Async& run) {
  const std::vector<DonorPtr> donors = state.would_be->Used(run.tensors_data);
  DonationRegistry::Get().Spare(donors, state.would_be->step);
  for (const DonorPtr& donor : donors) {
    if (const lazy::BackendDataPtr buffer = donor->buffer.lock()) {
      ForgetCachedValues(*donor, buffer.get());
    }
  }
  state.last_spared = state.would_be->step;
  state.would_be_runner = &run.mwait;
}

// Which parameters of the graph somebody can still reach, by position; nothing if that cannot be told.
//
// What was held when the list was made, what is held now, and what has been made since: whatever another thread does
// meanwhile, a buffer is in one of them until nobody has it.
std::optional<Liveness> HeldParameters(const ThreadState& state, const Executor::PostOrderData& graph,
                                       const lazy::BackendDevice& device,
                                       const std::vector<std::shared_ptr<abi::TensorData>>& live) {
  Liveness liveness(graph.parameters_data);
  const auto hold = [&liveness](const abi::TensorData* data, const lazy::BackendData* listed) {
    if (data == nullptr) {
      liveness.Hold(listed);
      return true;
    }
    liveness.Hold(data->handle.get());
    if (listed != data->handle.get()) {
      liveness.Hold(listed);
    }
    // A tensor that has a buffer keeps no other graph than the node of that buffer, and the graph of an output has
    // become the step's.
    if (data->handle == nullptr && data->ir_value) {
      liveness.HoldGraph(data->ir_value);
    }
    return !abi::HasView(*data);
  };
  for (std::size_t i = 0; i < live.size(); ++i) {
    if (!hold(live[i].get(), state.list[i].buffer)) {
      return std::nullopt;
    }
  }
  for (const auto& data : abi::TensorsSince(state.arena, device, state.newest)) {
    if (!hold(data.get(), nullptr)) {
      return std::nullopt;
    }
  }
  return liveness;
}

// Why automatic donation leaves the step alone; empty if it does not.
Reason AutoObstacleOf(const abi::OutputIds& ids) {
  for (const Reason& reason : {TheAutoObstacle().reason, SwitchedOffReason()}) {
    if (!reason.empty()) {
      return reason;
    }
  }
  if (abi::KeepsNodes()) {
    return ReasonCode::kKeptNodes;
  }
  return ids.Empty() ? ReasonCode::kUnmatched : ReasonCode::kNone;
}

using DonorsByBuffer = ska::flat_hash_map<const lazy::BackendData*, DonorPtr>;

DonorsByBuffer ByBuffer(const std::vector<DonorPtr>& donors) {
  DonorsByBuffer result;
  for (const DonorPtr& donor : donors) {
    result.emplace(donor->buffer.lock().get(), donor);
  }
  return result;
}

// What the planner has to know of a step. `held` is what live tensors can reach; without it no input may become a
// donor.
AutoQuestion AskAbout(const Executor::PostOrderData& graph, const std::vector<lazy::Value>& roots,
                      const Executor::SyncTensorCollection& collection,
                      const std::vector<const abi::TensorData*>& outputs, const abi::OutputIds& ids,
                      const DonorsByBuffer& donor_of, const std::optional<Liveness>& held) {
  const std::size_t count = graph.parameters_data.size();
  std::unordered_map<const abi::TensorData*, std::size_t> output_of_tensor;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    output_of_tensor.emplace(outputs[i], i);
  }
  AutoQuestion question{graph,
                        roots,
                        collection.device,
                        collection.hash,
                        /*sharded=*/abi::IsSpmd(collection.device),
                        /*automatic=*/held.has_value(),
                        /*held=*/held.has_value() ? held->Held() : std::vector<bool>(count, true),
                        /*read_later=*/held.has_value() ? held->Read() : std::vector<bool>(count, true),
                        /*barred=*/std::vector<bool>(count, false),
                        /*donors=*/std::vector<bool>(count, false),
                        /*wanted=*/std::vector<std::optional<std::size_t>>(count)};
  for (std::size_t i = 0; i < count; ++i) {
    const lazy::BackendData& buffer = *graph.parameters_data[i];
    const abi::DeviceDataInfo* info = abi::InfoOf(buffer);
    const auto own = ids.ReplacementOf(buffer);
    if (const auto found = donor_of.find(&buffer); found != donor_of.end()) {
      question.donors[i] = true;
      const auto target = output_of_tensor.find(found->second->Target().get());
      question.wanted[i] = target != output_of_tensor.end() ? std::optional(target->second) : own;
    } else if (info == nullptr ? buffer.info() != nullptr : info->read_only) {
      question.barred[i] = true;
    } else if (own.has_value()) {
      question.donors[i] = true;
      question.wanted[i] = own;
    }
    if (!(buffer.device() == collection.device)) {
      question.barred[i] = true;
    }
  }
  return question;
}

// Completes the donors of a step: to those asked for it adds, if `automatic`, the inputs that no live tensor can reach
// after the step. Orders parameters and outputs so that XLA gives each donor to the output computed from it. Returns
// all donors in the order of the parameters.
std::vector<DonorPtr> PlanDonors(ThreadState& state, Executor::PostOrderData& graph,
                                 const std::vector<lazy::Value>& roots, Executor::SyncTensorCollection& collection,
                                 const std::vector<std::shared_ptr<abi::TensorData>>& live,
                                 const std::vector<const abi::TensorData*>& outputs, const abi::OutputIds& ids,
                                 const std::vector<DonorPtr>& asked, bool automatic, StepInProgress& progress) {
  const std::size_t count = graph.parameters_data.size();
  std::optional<Liveness> held;
  if (automatic) {
    const Reason obstacle = AutoObstacleOf(ids);
    if (obstacle.empty()) {
      held = HeldParameters(state, graph, collection.device, live);
    }
    if (!held.has_value()) {
      DonationRegistry::Get().NoteAutoRefusal(obstacle.empty() ? ReasonCode::kSharedGraphs : obstacle);
    }
  }
  DonorsByBuffer donor_of = ByBuffer(asked);
  const AutoQuestion question = AskAbout(graph, roots, collection, outputs, ids, donor_of, held);
  const AutoAnswer answer = AutoPlans::Get().Choose(question);
  const AutoChoice& choice = *answer.choice;
  for (std::size_t i = 0; i < choice.parameters.size(); ++i) {
    const lazy::BackendDataPtr& buffer = graph.parameters_data[choice.parameters[i]];
    auto donor = std::make_shared<Donor>(*choice.prototypes[i]);
    donor->device = collection.device;  // another may have had this graph before
    donor->buffer = buffer;
    if (question.sharded) {
      progress.sharded_donors.push_back(donor);
    }
    donor_of.emplace(buffer.get(), std::move(donor));
  }
  if (question.sharded) {
    progress.sharded = answer;
  }
  progress.moved = MoveOutputs(choice.pairs.output_order, roots, live, collection);
  std::vector<std::size_t> place_of(roots.size());
  for (std::size_t place = 0; place < roots.size(); ++place) {
    place_of[progress.moved.empty() ? place : choice.pairs.output_order[place]] = place;
  }
  for (std::size_t i = 0; i < count; ++i) {
    const auto successor = choice.pairs.successor[i];
    if (const auto found = donor_of.find(graph.parameters_data[i].get()); found != donor_of.end() && successor) {
      found->second->successor = place_of[*successor];
    }
  }
  PutFirst(choice.pairs.parameter_order, graph, collection);
  std::vector<DonorPtr> donors;
  for (std::size_t i = 0; i < count; ++i) {
    if (const auto found = donor_of.find(graph.parameters_data[i].get()); found != donor_of.end()) {
      found->second->parameter = i;
      donors.push_back(std::move(found->second));
      donor_of.erase(found);
    }
  }
  return donors;
}

void ClaimDonors(ThreadState& state, Executor::PostOrderData& graph, const std::vector<lazy::Value>& roots,
                 Executor::SyncTensorCollection* collection, const Reason& obstacle) {
  DonationRegistry& registry = DonationRegistry::Get();
  const auto marked = registry.PendingAmong(graph.parameters_data);
  bool automatic = AutoDonates() && state.arena != nullptr && !DonationDisabled();
  if (marked.empty() && !automatic) {
    return;
  }
  Reason refusal = SwitchedOffReason();  // of all of them
  bool switched_off = true;
  if (refusal.empty() && !obstacle.empty()) {
    switched_off = false;
    refusal = obstacle;
    if (automatic) {
      automatic = false;
      registry.NoteAutoRefusal(obstacle);
    }
  }
  // Donors that nothing but the user's wish keeps from being donated are spared, and their use is told.
  bool spare = false;
  if (DonationDisabled()) {
    spare = refusal.empty() && state.Reporting();
    refusal = DisabledReason();
  }
  const std::vector<std::shared_ptr<abi::TensorData>> live = ListedTensors();
  const std::vector<const abi::TensorData*> outputs = OutputsOf(live, *collection, roots.size());
  abi::OutputIds ids;
  for (const abi::TensorData* output : outputs) {
    ids.Add(*output);
  }
  if (outputs.empty()) {
    spare = false;
  }
  if (refusal.empty() && outputs.empty()) {
    switched_off = false;
    refusal = ReasonCode::kUnmatched;
  }
  std::vector<Candidate> candidates;
  candidates.reserve(marked.size());
  for (const auto& [index, donor] : marked) {
    candidates.push_back({graph.parameters_data[index], donor, spare ? Reason() : refusal});
  }
  if (refusal.empty() || spare) {
    RefuseSharedBuffers(live, candidates);
  }

  auto progress = std::make_shared<StepInProgress>();
  std::vector<DonorPtr> asked;
  std::vector<DonationRegistry::Refusal> refused;
  std::vector<DonorPtr> spared;
  for (Candidate& candidate : candidates) {
    const abi::DeviceDataInfo* info = abi::InfoOf(*candidate.buffer);
    if (candidate.refusal.empty() && info != nullptr && info->read_only) {
      candidate.refusal = ReasonCode::kConstant;
    }
    if (spare) {
      if (candidate.refusal.empty()) {
        spared.push_back(candidate.donor);
      }
      candidate.refusal = refusal;
    }
    if (!candidate.refusal.empty()) {
      refused.push_back({candidate.donor, candidate.refusal, refusal.empty() || !switched_off});
      continue;
    }
    asked.push_back(candidate.donor);
  }
  if (automatic && !refusal.empty()) {
    registry.NoteAutoRefusal(refusal);
  } else if (refusal.empty() && (automatic || !asked.empty())) {
    const std::vector<DonorPtr> marks = asked;
    try {
      asked = PlanDonors(state, graph, roots, *collection, live, outputs, ids, marks, automatic, *progress);
    } catch (const std::exception& error) {  // marks are worth more
      asked = marks;
      registry.NoteAutoRefusal({ReasonCode::kPlanFailed, error.what()});
    }
  }
  // The executor donates a parameter whose info names an output; any output will do, as XLA pairs by size.
  const auto ours = asked.empty() ? nullptr : std::make_shared<abi::DeviceDataInfo>(ids.Any(), false);
  progress->rewritten.reserve(asked.size());
  for (const DonorPtr& donor : asked) {
    const lazy::BackendDataPtr buffer = donor->buffer.lock();
    if (!ids.ReplacementOf(*buffer).has_value()) {
      progress->rewritten.push_back({buffer, ours, nullptr});
      progress->rewritten.back().before = buffer->SetInfo(ours);
    }
  }
  if (!asked.empty() || !refused.empty()) {
    const StepPtr step = registry.Claim(std::move(asked), std::move(refused), state.after_backward_thread);
    state.recorded = true;
    if (!spared.empty()) {
      const AutoAnswer plan = AutoPlans::Get().Choose(
          AskAbout(graph, roots, *collection, outputs, ids, ByBuffer(spared), /*held=*/std::nullopt));
      NoteWouldBe(state, graph, collection, spared, ids, plan.choice->pairs.parameter_order, step->number);
    }
    progress->step = step->donors.empty() ? nullptr : step;
  }
  if (progress->step == nullptr && progress->moved.empty()) {
    return;
  }
  for (const Candidate& candidate : candidates) {
    if (candidate.refusal.empty()) {
      ForgetCachedValues(*candidate.donor, candidate.buffer.get());
    }
  }
  state.current = progress;
  // A guard in the host's own stack frame: whatever is thrown before the step is scheduled destroys the collection.
  collection->unlocker.emplace_back([progress](lazy::ExceptionCleanup::StatusType&&) {
    if (!progress->compiled) {
      if (State().current == progress) {
        State().current = nullptr;
      }
      progress->Abandon(ReasonCode::kNotCompiled);
    }
  });
}

// An operation in eager mode is a graph of its own that runs at once. It donates nothing, and the marks that it has
// read must not wait for whatever step comes upon these buffers later.
void EndMarksReadEagerly(const std::vector<lazy::BackendDataPtr>& parameters) {
  DonationRegistry& registry = DonationRegistry::Get();
  std::vector<DonationRegistry::Refusal> refused;
  for (const auto& [position, donor] : registry.PendingAmong(parameters)) {
    const bool off = DonationDisabled();
    refused.push_back({donor, off ? DisabledReason() : ReasonCode::kReadEagerly, /*tell=*/!off});
  }
  if (!refused.empty()) {
    registry.Claim({}, std::move(refused));
  }
}

// A graph that is hashed or compiled outside of a step, with the donors that OrderParameters() has named.
void ApplyOrder(ThreadState& state, Executor::PostOrderData& graph, const std::vector<lazy::Value>& roots,
                Executor::SyncTensorCollection& collection) {
  const std::size_t count = graph.parameters_data.size();
  const ArraySizes sizes = MeasureArrays(graph.parameters_data, roots, abi::IsSpmd(collection.device));
  std::vector<bool> donors(count);
  for (std::size_t i = 0; i < count; ++i) {
    donors[i] = state.ordered_donors->count(graph.parameters_data[i].get()) != 0;
  }
  const DonorPairs pairs = PairDonors({graph.parameters_data, roots, sizes.bytes, sizes.output_bytes,
                                       /*movable=*/std::vector<bool>(roots.size(), false), donors,
                                       /*offered=*/std::vector<bool>(count, false),
                                       /*wanted=*/std::vector<std::optional<std::size_t>>(count)});
  std::unordered_map<const lazy::BackendData*, std::optional<std::size_t>> successor_of;
  for (std::size_t i = 0; i < count; ++i) {
    successor_of.emplace(graph.parameters_data[i].get(), pairs.successor[i]);
  }
  PutFirst(pairs.parameter_order, graph, collection);
  state.ordered_parameters.clear();
  for (const lazy::BackendDataPtr& parameter : graph.parameters_data) {
    state.ordered_parameters.push_back({parameter.get(), successor_of[parameter.get()]});
  }
}

// The token that orders the collectives of a step leads to its inputs, and a collective of a later step would read them
// by way of it. torch_xla.sync() drops it when the step is over, but after the step closures, and whoever syncs the
// live tensors without that does not. As the graph of this step is complete, it can go before the donors are chosen,
// and before the executor has a lock, for which somebody who has the GIL may wait. Returns why it may still be there;
// empty if it is gone.
Reason ForgetCollectives(const Executor::SyncTensorCollection& collection) {
  if (!collection.unlocker.empty()) {
    return ReasonCode::kDeviceLocked;
  }
  try {
    Callbacks().forget_collectives(abi::TorchDevice(collection.device).str());
    return {};
  } catch (const std::exception& error) {
    return {ReasonCode::kTokenKept, error.what()};
  }
}

// ---- The intercepts ----

Executor::PostOrderData RunPostOrder(lazy::LazyGraphExecutor* self, const std::vector<lazy::Value>& roots,
                                     Executor::SyncTensorCollection* collection) {
  ThreadState& state = State();
  state.would_be.reset();
  state.recorded = false;
  state.in_post_order = true;
  const auto leave = c10::make_scope_exit([&state] { state.in_post_order = false; });
  // print(), .item() and .cpu() clear sync_ltc_data, a warm-up clears force_ltc_data; both only at a step.
  const bool runs_all = collection->config.force_ltc_data && collection->config.sync_ltc_data;
  if (std::exchange(state.listed, false) && runs_all) {
    AutoPlans::Get().BeginStep(collection->device);
  }
  const bool is_step = runs_all && state.ListIsOfStep(roots.size());
  if (is_step) {
    state.after_backward_thread = TakeBackwardThread();
  }
  const Reason refusal = is_step ? ForgetCollectives(*collection) : Reason();
  Executor::PostOrderData result = run_post_order.As<abi::RunPostOrderFn>()(self, roots, collection);
  collection->hash = lazy::HashCombine(collection->hash, HashWiring(result.post_order, roots));
  if (state.ordered_donors.has_value()) {
    ApplyOrder(state, result, roots, *collection);
  }
  if (is_step) {
    try {
      ClaimDonors(state, result, roots, collection, refusal);
    } catch (const std::exception& error) {
      // Out of memory, at worst: the step must go on, without donation.
      DonationRegistry::Get().NoteError(error.what());
      AbandonLeftover(state);
    }
  } else if (DonationRegistry::Armed() && collection->config.force_ltc_data && !collection->config.sync_ltc_data &&
             abi::InEagerMode(*self)) {
    EndMarksReadEagerly(result.parameters_data);
  }
  state.DropList();
  return result;
}

void TensorCollectionBarrier(lazy::LazyGraphExecutor* self, Executor::SyncTensorCollection* collection) {
  host_executor.store(self, std::memory_order_relaxed);
  ThreadState& state = State();
  state.barriers += state.refusing_runs ? 1 : 0;
  if (!state.in_post_order) {
    state.DropList();
  }
  if (state.current == nullptr) {
    tensor_collection_barrier.As<abi::TensorCollectionBarrierFn>()(self, collection);
    return;
  }
  const std::shared_ptr<StepInProgress> current = state.current;
  current->compiled = true;
  current->GiveInfosBack();
  // Our guard. What is before it is the device's lock, if the executor has taken that already; it looks whether the
  // list is empty.
  collection->unlocker.pop_back();
  try {
    tensor_collection_barrier.As<abi::TensorCollectionBarrierFn>()(self, collection);
  } catch (...) {
    // The barrier passes on what made an earlier step fail; this one will not run.
    state.current = nullptr;
    current->Abandon(ReasonCode::kEarlierStepFailed);
    throw;
  }
  current->moved.clear();
  if (current->step == nullptr) {
    state.current = nullptr;
  }
}

// The run has been compiled without these donors, since donation is disabled.
void SpareRun(ThreadState& state, Executor::Async* run, const std::vector<DonorPtr>& donors) {
  std::vector<DonationRegistry::Refusal> refused;
  for (const DonorPtr& donor : donors) {
    refused.push_back({donor, DisabledReason(), /*tell=*/false});
  }
  WouldBe would_be(nullptr, DonationRegistry::Get().Claim({}, std::move(refused))->number);
  if (!state.Reporting()) {
    return;
  }
  for (const DonorPtr& donor : donors) {
    if (const lazy::BackendDataPtr buffer = donor->buffer.lock()) {
      would_be.Add(*buffer, donor);
    }
  }
  state.would_be = std::move(would_be);
  SpareDonors(state, *run);
  state.would_be.reset();
}

// A compiled graph is about to run on this thread, outside of a step. Its donors are settled as a step's are. Returns
// whether it has any.
bool ClaimRun(ThreadState& state, Executor::Async* run) {
  const ArmedRun armed = std::move(*state.armed);
  state.armed.reset();
  DonationRegistry& registry = DonationRegistry::Get();
  std::vector<DonorPtr> donors;
  std::vector<lazy::BackendDataPtr> buffers;
  for (const RunDonor& donor : armed.donors) {
    buffers.push_back(donor.buffer);
  }
  for (const auto& [position, donor] : registry.PendingAmong(buffers, armed.call.get())) {
    donor->parameter = armed.donors[position].parameter;
    donor->successor = armed.donors[position].successor;
    donors.push_back(donor);
  }
  if (donors.empty()) {
    return false;
  }
  if (DonationDisabled()) {
    SpareRun(state, run, donors);
    return true;
  }
  auto progress = std::make_shared<StepInProgress>();
  progress->compiled = true;
  progress->run = run;
  progress->step = registry.Claim(donors, {});
  for (std::size_t i = 0; i < donors.size(); ++i) {
    ForgetCachedValues(*donors[i], donors[i]->buffer.lock().get());
  }
  state.current = progress;
  registry.Commit(progress->step, armed.graph, run->tensors_data);
  return true;
}

void NoteForDebugging(ThreadState& state, Executor::Async& run, const Executor::SyncTensorCollection& collection) {
  try {
    if (state.would_be && state.would_be->collection == &collection) {
      SpareDonors(state, run);
    }
    // Not the reads (print, .item(), .cpu()).
    if (state.Checking() && collection.config.force_ltc_data && collection.config.sync_ltc_data) {
      OutputCheck::OfThisThread().Note(run);
    }
  } catch (const std::exception& error) {
    // Out of memory, at worst: the run must go on, unchecked.
    DonationRegistry::Get().NoteError(error.what());
  }
  state.would_be.reset();
}

void AsyncConstructor(Executor::Async* self, Executor::SyncTensorCollection* collection,
                      std::vector<lazy::BackendDataPtr> parameters, std::vector<lazy::BackendDataPtr> outputs,
                      lazy::LazyGraphExecutor::ComputationCache::TypePtr computation) {
  if (State().refusing_runs) {
    throw std::runtime_error("Unexpected execution while a function is traced");
  }
  const lazy::hash_t hash = collection->hash;
  // Not the reads (print, .item(), .cpu()).
  const bool is_run = collection->config.force_ltc_data && collection->config.sync_ltc_data;
  async_constructor.As<abi::AsyncConstructorFn>()(self, collection, std::move(parameters), std::move(outputs),
                                                  std::move(computation));
  ThreadState& state = State();
  ++state.runs;
  if (state.inspecting) {
    state.inspected_run = self;
    return;
  }
  if (state.would_be || state.Checking()) {
    NoteForDebugging(state, *self, *collection);
  }
  if (state.current == nullptr && state.armed.has_value() && ClaimRun(state, self)) {
    return;
  }
  if (state.current == nullptr || !state.current->compiled || state.current->run != nullptr) {
    if (is_run && !state.recorded && !std::exchange(state.expected, false)) {
      DonationRegistry::Get().NotePlainStep();
    }
    return;
  }
  state.current->run = self;
  DonationRegistry::Get().Commit(state.current->step, lazy::HashToString(hash), self->tensors_data);
}

// For the report, which reads the executable's text when the program asks for it.
void NoteExecutable(const StepInProgress& progress) {
  try {
    DonationRegistry::Get().NoteExecutable(progress.step, abi::ExecutableOf(*progress.run));
  } catch (const std::exception&) {
    // Of another class than expected: the report does not know which output took which donor.
  }
}

std::function<void()> Completer(lazy::MultiWait* self, std::function<void()> run) {
  ThreadState& state = State();
  if (state.inspected_run != nullptr && &state.inspected_run->mwait == self) {
    // The graph has come to the run by now; to throw here keeps it from being scheduled.
    state.inspected = abi::DescribeGraph(*abi::ExecutableOf(*std::exchange(state.inspected_run, nullptr)));
    throw InspectedRun("the graph was described, not run");
  }
  run = OutputCheck::OfThisThread().Watch(self, std::move(run));
  if (state.would_be_runner != nullptr && std::exchange(state.would_be_runner, nullptr) == self) {
    run = [run = std::move(run), step = state.last_spared] {
      try {
        run();
      } catch (...) {
        DonationRegistry::Get().Forgive(step);  // a step that fails consumes nothing
        throw;
      }
    };
  }
  if (state.current != nullptr && state.current->IsRunBy(self)) {
    const std::shared_ptr<StepInProgress> current = std::move(state.current);
    state.current = nullptr;
    NoteExecutable(*current);
    run = [run = std::move(run), current] {
      try {
        run();
      } catch (const std::exception& error) {
        DonationRegistry::Get().Settle(current->step, {ReasonCode::kFailed, error.what()});
        throw;
      } catch (...) {
        DonationRegistry::Get().Settle(current->step, ReasonCode::kFailedForeign);
        throw;
      }
      DonationRegistry::Get().Settle(current->step);
      // Not where other processes must compile the same graph: the next step may come before this or after it.
      if (!one_of_many.load(std::memory_order_relaxed)) {
        current->Learn();
      }
    };
  }
  return completer.As<abi::CompleterFn>()(self, std::move(run));
}

// Whether a step has consumed the buffer, or would have.
bool IsGone(const lazy::BackendData* buffer) {
  if (!DonationRegistry::Armed()) {
    return false;
  }
  const DonationRegistry& registry = DonationRegistry::Get();
  return (registry.IsTracked(buffer) || (registry.HasSpared() && registry.FindSpared(buffer).first != nullptr));
}

// The part of a hook that has something to look for stands apart from it in the two hooks that each live tensor passes
// in each step: with nothing to look for they are a test and a jump.
[[gnu::noinline]] lazy::BackendDataPtr CheckedHandle(const lazy::LazyTensor* self) {
  lazy::BackendDataPtr handle = current_data_handle.As<abi::CurrentDataHandleFn>()(self);
  ThreadState& state = State();
  if (state.noting) {
    if (state.BelongsToList(*self, handle != nullptr)) {
      return handle;
    }
    state.DropList();
  }
  if (handle == nullptr || IsReplacing() || !IsGone(handle.get())) {
    return handle;
  }
  ThrowIfConsumed(handle.get());
  ReportReuse(handle.get());
  return handle;
}

lazy::BackendDataPtr CurrentDataHandle(const lazy::LazyTensor* self) {
  return Watching() ? CheckedHandle(self) : current_data_handle.As<abi::CurrentDataHandleFn>()(self);
}

lazy::Value CreateTensorNode(const lazy::LazyTensor* self, const lazy::BackendDataPtr& data, bool read_only) {
  if (DonationRegistry::Armed()) {
    ThrowIfConsumed(data.get());
    if (ReportReuse(data.get())) {
      State().reused.push_back({self->data(), data.get()});
    }
  }
  return create_tensor_node.As<abi::CreateTensorNodeFn>()(self, data, read_only);
}

void ForAllDeviceContexts(void* arena, const void* function, const lazy::BackendDevice* device) {
  // Old values that nothing can read must not be listed: they would be outputs, and keep buffers from being donated.
  if (DonationRegistry::HasPending() || AutoDonates()) {
    OutdatedTensors::Get().BringUpToDate(device);
  }
  ThreadState& state = State();
  AbandonLeftover(state);
  ForgetReused(state);
  state.last_spared = 0;
  state.DropList();
  if (DonationRegistry::Armed()) {
    DonationRegistry::Get().Sweep();
    state.noting = DonationRegistry::Armed();
  }
  state.arena = nullptr;
  if (AutoDonates() && AutoObstacleKnown()) {  // asked before the list, as that makes a tensor of its own
    state.noting = true;
    state.arena = arena;
  }
  state.listing = state.listed = true;
  const auto leave = c10::make_scope_exit([&state] { state.listing = false; });
  for_all_device_contexts.As<abi::ForAllDeviceContextsFn>()(arena, function, device);
}

[[gnu::noinline]] void NotedConstructor(lazy::LazyTensor* self, std::shared_ptr<abi::TensorData>& data) {
  ThreadState& state = State();
  if (!state.listing) {
    ForgetReused(state);  // the op that used them has its result
    state.DropList();     // the program goes on; whoever made the list has finished
    NoteBackwardThread();
  } else if (state.noting) {
    state.list.push_back({data, data.get(), data->handle.get()});
    state.newest = std::max(state.newest, data->unique_id);
  }
  lazy_tensor_constructor.As<abi::LazyTensorConstructorFn>()(self, data);
}

void LazyTensorConstructor(lazy::LazyTensor* self, std::shared_ptr<abi::TensorData>& data) {
  return Watching() ? NotedConstructor(self, data)
                    : lazy_tensor_constructor.As<abi::LazyTensorConstructorFn>()(self, data);
}

void MarkStep(void* arena, const lazy::BackendDevice& device) {
  mark_step.As<abi::MarkStepFn>()(arena, device);
  State().DropList();
  State().last_device = device;
  const bool to_tell = DonationRegistry::Get().HasNotices() || !OutputCheck::OfThisThread().Empty();
  if (to_tell && Callbacks().step_ended) {
    Callbacks().step_ended();
  }
}

}  // namespace

std::vector<Hook> ExecutorHooks() {
  const auto row = [](const char* name, const char* symbol, auto* replacement, Original& original,
                      const char* purpose) {
    return Hook{name, HookedLibrary::kExtension, {symbol}, reinterpret_cast<void*>(replacement), &original, purpose};
  };
  return {
      row("DeviceContextArena::ForAllDeviceContexts", abi::kForAllDeviceContexts, &ForAllDeviceContexts,
          for_all_device_contexts, "a list of live tensors begins"),
      row("LazyTensor::LazyTensor", abi::kLazyTensorConstructor, &LazyTensorConstructor, lazy_tensor_constructor,
          "notes the live tensors"),
      row("LazyTensor::CurrentDataHandle", abi::kCurrentDataHandle, &CurrentDataHandle, current_data_handle,
          "finds reads of donated tensors"),
      row("LazyGraphExecutor::RunPostOrder", abi::kRunPostOrder, &RunPostOrder, run_post_order,
          "chooses the donors of a step"),
      row("LazyGraphExecutor::TensorCollectionBarrier", abi::kTensorCollectionBarrier, &TensorCollectionBarrier,
          tensor_collection_barrier, "compiled: gives rewritten infos back"),
      row("LazyGraphExecutor::Async::Async", abi::kAsyncConstructor, &AsyncConstructor, async_constructor,
          "the step will run: donors are committed"),
      row("MultiWait::Completer", abi::kCompleter, &Completer, completer, "the step has run: outcomes are read"),
      row("DeviceContextArena::MarkStep", abi::kMarkStep, &MarkStep, mark_step,
          "end of the step: unusable donations are told"),
      row("LazyTensor::CreateTensorNode", abi::kCreateTensorNode, &CreateTensorNode, create_tensor_node,
          "finds ops on donated tensors"),
  };
}

PyObject* DonatedBufferAccess::python_type() { return Callbacks().donated_buffer_error; }

void SetHookCallbacks(HookCallbacks callbacks) { Callbacks() = std::move(callbacks); }

void SetSwitchedOff(Reason reason) {
  std::lock_guard<std::mutex> lock(TheSwitch().mutex);
  TheSwitch().reason = std::move(reason);
}

Reason SwitchedOffReason() {
  std::lock_guard<std::mutex> lock(TheSwitch().mutex);
  return TheSwitch().reason;
}

void OrderParameters(std::unordered_set<const lazy::BackendData*> donors) {
  State().ordered_donors = std::move(donors);
  State().ordered_parameters.clear();
}

std::vector<OrderedParameter> TakeOrder() {
  State().ordered_donors.reset();
  return std::exchange(State().ordered_parameters, {});
}

void ArmRun(std::shared_ptr<const CallSite> call, std::vector<RunDonor> donors, std::string graph) {
  ThreadState& state = State();
  AbandonLeftover(state);
  state.armed = ArmedRun{std::move(call), std::move(donors), std::move(graph)};
}

void ExpectRun() { State().expected = true; }

void RefuseRuns(bool on) { State().refusing_runs = on; }

std::uint64_t RunsBegun() { return State().runs; }

void VerifyExecutor(bool eager_mode, bool allow_execution) {
  const lazy::LazyGraphExecutor* executor = host_executor.load(std::memory_order_relaxed);
  if (executor == nullptr) {
    throw std::runtime_error("no executor has passed the barrier");
  }
  abi::VerifyExecutor(*executor, eager_mode, allow_execution);
}

std::uint64_t BarriersPassed() { return State().barriers; }

void NoteDevice(const lazy::BackendDevice& device) { State().last_device = device; }

std::optional<lazy::BackendDevice> LastDevice() { return State().last_device; }

void DisarmRun() {
  ThreadState& state = State();
  state.armed.reset();
  AbandonLeftover(state);
}

std::vector<std::shared_ptr<abi::TensorData>> ListedTensors() {
  const std::vector<Listed>& list = State().list;
  std::vector<std::shared_ptr<abi::TensorData>> result;
  result.reserve(list.size());
  for (const Listed& listed : list) {
    result.push_back(listed.tensor.lock());
  }
  return result;
}

void InspectNextRun() {
  State().inspecting = true;
  State().inspected.reset();
}

std::optional<abi::CompiledGraph> TakeInspected() {
  ThreadState& state = State();
  state.inspecting = false;
  state.inspected_run = nullptr;
  return std::exchange(state.inspected, std::nullopt);
}

void PushDonationDisabled(Disabling wishes) {
  ThreadState& state = State();
  ++state.disabled;
  state.reporting += wishes.report_reuse ? 1 : 0;
  state.checking += wishes.check_outputs ? 1 : 0;
}

void PopDonationDisabled(Disabling wishes) {
  ThreadState& state = State();
  --state.disabled;
  state.reporting -= wishes.report_reuse ? 1 : 0;
  state.checking -= wishes.check_outputs ? 1 : 0;
  if (!state.Checking()) {
    OutputCheck::OfThisThread().Drop();
  }
}

void SetAutoDonate(bool on) {
  if (on) {
    OutdatedTensors::FollowAliases();
  }
  if (auto_default.exchange(on) != on) {
    auto_wishes += on ? 1 : -1;
  }
}

bool AutoDonateIsDefault() { return auto_default.load(); }

void PushAutoDonate(bool on) {
  if (on) {
    OutdatedTensors::FollowAliases();
  }
  State().auto_donates.push_back(on);
  auto_wishes += on ? 1 : 0;
}

std::size_t AutoDonateDepth() { return State().auto_donates.size(); }

void PopAutoDonate(std::size_t depth) {
  std::vector<bool>& wishes = State().auto_donates;
  while (wishes.size() > depth) {  // not where a context is left on another thread than it was entered on
    auto_wishes -= wishes.back() ? 1 : 0;
    wishes.pop_back();
  }
}

bool AutoDonates() {
  if (auto_wishes.load(std::memory_order_relaxed) == 0) {
    return false;
  }
  const std::vector<bool>& wishes = State().auto_donates;
  return wishes.empty() ? auto_default.load(std::memory_order_relaxed) : wishes.back();
}

Reason DisabledReason() {
  const ThreadState& state = State();
  return state.checking > 0   ? ReasonCode::kDebugNans
         : state.disabled > 0 ? ReasonCode::kDisabled
         : DonationDisabled() ? ReasonCode::kDebugProcess
                              : ReasonCode::kNone;
}

bool DonationDisabled() { return State().disabled > 0 || State().Checking(); }

void SetOneOfMany(bool on) { one_of_many.store(on, std::memory_order_relaxed); }

void SetDebugProcess(bool on) { debug_process.store(on, std::memory_order_relaxed); }

std::vector<BadOutput> TakeBadOutputs(bool infs) {
  std::vector<BadOutput> bad = OutputCheck::OfThisThread().Check(infs);
  if (!bad.empty()) {
    DonationRegistry::Get().Forgive(State().last_spared);
  }
  return bad;
}

bool ReportReuse(const lazy::BackendData* buffer) {
  const DonationRegistry& registry = DonationRegistry::Get();
  ThreadState& state = State();
  if (!registry.HasSpared() || state.telling || !Callbacks().report_reuse) {
    return false;
  }
  const auto [donor, step] = registry.FindSpared(buffer);
  if (donor == nullptr) {
    return false;
  }
  state.telling = true;
  const auto leave = c10::make_scope_exit([&state] { state.telling = false; });
  Callbacks().report_reuse(*donor, step);
  return true;
}

void ThrowIfConsumed(const lazy::BackendData* buffer) {
  DonationRegistry& registry = DonationRegistry::Get();
  if (!registry.IsTracked(buffer)) {
    return;
  }
  std::pair<DonorPtr, std::uint64_t> found;
  if (PyGILState_Check()) {
    PyThreadState* thread = PyEval_SaveThread();
    found = registry.FindConsumed(buffer);
    PyEval_RestoreThread(thread);
  } else {
    found = registry.FindConsumed(buffer);
  }
  if (found.first != nullptr) {
    throw DonatedBufferAccess(Callbacks().describe_use(*found.first, found.second));
  }
}

}  // namespace torch_xla_donate
