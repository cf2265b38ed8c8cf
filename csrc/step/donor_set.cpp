// Turns the proposals for a step into its claim; donor_set.h describes the order.
#include "step/donor_set.h"

#include <algorithm>
#include <exception>
#include <unordered_map>

#include "host/graphs.h"
#include "host/tensors.h"
#include "step/triage.h"

namespace torch_xla_donate {

namespace {

Reason ReasonOf(Obstacle obstacle) {
  switch (obstacle) {
    case Obstacle::kNone: break;
    case Obstacle::kViewed: return ReasonCode::kHasViews;
    case Obstacle::kShared: return ReasonCode::kHeldByOthers;
  }
  return {};
}

}  // namespace

void ForgetCachedValues(const std::vector<std::shared_ptr<abi::TensorData>>& tensors) noexcept {
  for (const std::shared_ptr<abi::TensorData>& tensor : tensors) {
    tensor->ir_value = lazy::Value();
    tensor->tensor_data.reset();
  }
}

// ---- Claim ----

Claim::~Claim() {
  RestoreInfos();
  ReleaseOutputs(moved_);
}

void Claim::RestoreInfos() noexcept {
  for (RewrittenInfo& info : rewritten_) {
    abi::RestoreInfo(*info.buffer, info.ours.get(), std::move(info.before));
  }
  rewritten_.clear();
}

void Claim::Compiled() {
  compiled_ = true;
  RestoreInfos();
}

void Claim::Abandon(const Reason& why) noexcept {
  RestoreInfos();
  ReleaseOutputs(moved_);
  if (const StepPtr step = std::exchange(step_, nullptr)) {
    DonationRegistry::Get().Abandon(step, why);
  }
}

void Claim::Commit(RunContext& run, std::string graph_hash) {
  run.graph = graph_hash;
  DonationRegistry::Get().Commit(step_, std::move(graph_hash), run.run.tensors_data);
  run.OnEnd([step = step_, settled = settled_](const Reason& failure) {
    DonationRegistry::Get().RecordOutcome(step, failure);
    if (failure.empty() && settled) {
      settled();
    }
  });
}

void Claim::CommitCompiled(RunContext& run, const std::vector<DonationRegistry::Offer>& offers,
                           std::string graph_hash) {
  compiled_ = true;
  auto [step, tensors] = DonationRegistry::Get().Claim(offers, {});
  step_ = std::move(step);
  ForgetCachedValues(tensors);
  try {
    Commit(run, std::move(graph_hash));
  } catch (...) {
    Abandon(ReasonCode::kGivenUp);
    throw;
  }
}

void Claim::NoteExecutable(const abi::Executor::Async& run) const {
  try {
    DonationRegistry::Get().NoteExecutable(step_, abi::ExecutableOf(run));
  } catch (const std::exception& error) {
    // another class than expected: the report does not know which output took which donor
    DonationRegistry::Get().NoteError(error.what());
  }
}

// ---- DonorSet ----

// The executor has just cleared the graph of each output's tensor (a placeholder will follow). So an output is a live
// tensor at one of the collection's indices that holds nothing. Leaves outputs_ empty if any of them does not match.
void DonorSet::FindOutputs() {
  live_ = list_.Tensors();
  const std::vector<std::size_t>& indices = context_.collection.indices;
  const auto tensor_at = [this](std::size_t index) { return index < live_.size() ? live_[index].get() : nullptr; };
  const auto is_output = [&tensor_at](std::size_t index) {
    const abi::TensorData* data = tensor_at(index);
    return data != nullptr && data->handle == nullptr && !data->ir_value;
  };
  if (indices.size() == context_.roots.size() && std::all_of(indices.begin(), indices.end(), is_output)) {
    std::transform(indices.begin(), indices.end(), std::back_inserter(outputs_), tensor_at);
  }
  for (std::size_t i = 0; i < outputs_.size(); ++i) {
    ids_.Add(*outputs_[i]);
    number_of_.emplace(outputs_[i], i);
  }
  if (outputs_.empty()) {
    context_.gate.Refuse(ReasonCode::kUnmatched, /*notify_user=*/true);
  }
}

void DonorSet::Triage() {
  if (context_.gate.verdict == Gate::Verdict::kRefuse) {
    return;
  }
  std::vector<const void*> buffers;
  for (const Proposed& proposed : proposed_) {
    buffers.push_back(context_.graph->parameters_data[proposed.mark.position].get());
  }
  std::vector<BufferHolder> holders;
  for (const auto& data : live_) {
    if (!proposed_.empty() && data != nullptr && data->handle != nullptr) {
      holders.push_back({data.get(), data->handle.get(), abi::HasView(*data)});
    }
  }
  const auto obstacles = FindObstacles(buffers, holders, [this](std::size_t i, const void* tensor) {
    const auto& marked = proposed_[i].mark.tensors;
    return std::any_of(marked.begin(), marked.end(), [tensor](const auto& data) { return data.get() == tensor; });
  });
  for (std::size_t i = 0; i < proposed_.size(); ++i) {
    Proposed& proposed = proposed_[i];
    proposed.refusal = ReasonOf(obstacles[i]);
    const auto info = abi::InfoOf(*context_.graph->parameters_data[proposed.mark.position]);
    if (proposed.refusal.empty() && info.has_value() && info->read_only) {
      proposed.refusal = ReasonCode::kConstant;
    }
  }
}

// The planner's request. Without `reach` no unmarked input may become a donor.
PlanRequest DonorSet::Request(const std::vector<PendingMark>& marks, const std::optional<Liveness>& reach) const {
  const abi::Executor::PostOrderData& graph = *context_.graph;
  const lazy::BackendDevice& device = context_.collection.device;
  const std::size_t count = graph.parameters_data.size();
  PlanRequest request{graph,
                      context_.roots,
                      device,
                      context_.collection.hash,
                      /*sharded=*/abi::IsSpmd(device),
                      /*automatic=*/reach.has_value(),
                      /*held=*/reach.has_value() ? reach->Held() : std::vector<bool>(count, true),
                      /*read_later=*/reach.has_value() ? reach->Read() : std::vector<bool>(count, true),
                      /*barred=*/std::vector<bool>(count, false),
                      /*donors=*/std::vector<bool>(count, false),
                      /*own=*/std::vector<bool>(count, false),
                      /*wanted=*/std::vector<std::optional<std::size_t>>(count)};
  for (const PendingMark& mark : marks) {
    request.donors[mark.position] = true;
    const auto target = number_of_.find(mark.target.get());
    if (target != number_of_.end()) {
      request.wanted[mark.position] = target->second;
    }
  }
  for (std::size_t i = 0; i < count; ++i) {
    const lazy::BackendData& buffer = *graph.parameters_data[i];
    const std::optional<abi::DataInfo> info = abi::InfoOf(buffer);
    const auto own = ids_.ReplacementOf(buffer);
    request.own[i] = own.has_value();
    // torch_xla notes an info on the data of tensors. The random seed has none.
    if (!request.donors[i] && (!info.has_value() || info->read_only)) {
      request.barred[i] = true;
    } else if (request.donors[i] || own.has_value()) {
      request.donors[i] = true;
      request.wanted[i] = request.wanted[i].has_value() ? request.wanted[i] : own;
    }
    if (!(buffer.device() == device)) {
      request.barred[i] = true;
    }
  }
  return request;
}

// Adds the inputs that the planner chooses to the marks. Orders the parameters, and prepares an order of the outputs,
// so that XLA gives each donor to the output computed from it.
DonorSet::Donation DonorSet::Plan(const std::vector<PendingMark>& marks) const {
  abi::Executor::PostOrderData& graph = *context_.graph;
  const PlanRequest request = Request(marks, find_reach_ ? find_reach_(*this) : std::nullopt);
  const PlanResult result = DonorPlanner::Get().Choose(request);
  const DonorChoice& choice = *result.choice;
  Donation donation;
  ska::flat_hash_map<const lazy::BackendData*, Offer> offer_of;
  for (const PendingMark& mark : marks) {
    offer_of.emplace(graph.parameters_data[mark.position].get(), Offer{mark.donor});
  }
  std::vector<DonorPtr> inputs;
  for (std::size_t i = 0; i < choice.pairs.chosen.size(); ++i) {
    DonorArray array = choice.prototypes[i];
    array.device = context_.collection.device;  // another device may have had this graph before
    array.buffer = graph.parameters_data[choice.pairs.chosen[i]];
    inputs.push_back(std::make_shared<Donor>(std::move(array)));
    offer_of.emplace(graph.parameters_data[choice.pairs.chosen[i]].get(), Offer{inputs.back()});
  }
  donation.move = PrepareMove(choice.pairs.output_order, context_.roots, live_, context_.collection);
  std::vector<std::size_t> place_of(context_.roots.size());
  for (std::size_t place = 0; place < place_of.size(); ++place) {
    place_of[donation.move.has_value() ? choice.pairs.output_order[place] : place] = place;
  }
  for (const PendingMark& mark : marks) {
    if (const auto target = number_of_.find(mark.target.get()); target != number_of_.end()) {
      offer_of.at(graph.parameters_data[mark.position].get()).requested = place_of[target->second];
    }
  }
  const std::size_t count = graph.parameters_data.size();
  for (std::size_t i = 0; i < count; ++i) {
    const auto successor = choice.pairs.successor[i];
    if (const auto found = offer_of.find(graph.parameters_data[i].get()); found != offer_of.end() && successor) {
      found->second.successor = place_of[*successor];
    }
  }
  if (settled_ && !inputs.empty()) {
    donation.settled = [settled = settled_, result, inputs = std::move(inputs)] { settled(result, inputs); };
  }
  donation.offers.reserve(offer_of.size());
  PutFirst(choice.pairs.parameter_order, graph, context_.collection);
  for (std::size_t i = 0; i < count; ++i) {
    if (const auto found = offer_of.find(graph.parameters_data[i].get()); found != offer_of.end()) {
      found->second.parameter = i;
      donation.offers.push_back(std::move(found->second));
    }
  }
  return donation;
}

void DonorSet::EndDryRun(const std::vector<PendingMark>& marks, std::uint64_t step) const {
  const std::vector<lazy::BackendDataPtr>& parameters = context_.graph->parameters_data;
  const PlanRequest request = Request(marks, /*reach=*/std::nullopt);
  const PlanResult plan = DonorPlanner::Get().Choose(request);
  DryRun result{&context_.collection, step, {}};
  std::vector<DonorPtr> donor_at(parameters.size());
  for (const PendingMark& mark : marks) {
    donor_at[mark.position] = mark.donor;
  }
  std::vector<bool> added(parameters.size());
  const auto add = [&](std::size_t i) {
    if (!added[i] && request.donors[i]) {
      result.parameters.push_back({parameters[i], donor_at[i]});
    }
    added[i] = true;
  };
  const std::vector<std::size_t>& first = plan.choice->pairs.parameter_order;
  std::for_each(first.begin(), first.end(), add);
  for (std::size_t i = 0; i < added.size(); ++i) {
    add(i);
  }
  for (StepObserver* observer : Observers()) {
    observer->DryRunEnded(result);
  }
}

// Before the graph gets another order.
void DonorSet::Watch(const std::vector<PendingMark>& marks) const {
  const std::optional<Liveness> reach = find_watched_(*this);
  if (!reach.has_value() || outputs_.empty()) {
    return;
  }
  std::vector<std::int64_t> outputs;
  std::transform(outputs_.begin(), outputs_.end(), std::back_inserter(outputs),
                 [](const abi::TensorData* output) { return abi::AliasId(*output); });
  note_(Request(marks, reach), outputs, context_.gate.reason);
}

bool DonorSet::Commit(Claim& claim) {
  FindOutputs();
  Triage();
  DonationRegistry& registry = DonationRegistry::Get();
  const Gate& gate = context_.gate;
  const bool donates = gate.verdict == Gate::Verdict::kDonate;
  std::vector<PendingMark> fit;
  std::vector<DonationRegistry::Refusal> refused;
  for (Proposed& proposed : proposed_) {
    const bool is_fit = proposed.refusal.empty() && gate.verdict != Gate::Verdict::kRefuse;
    if (!donates) {
      refused.push_back({proposed.mark.donor, gate.reason, gate.notify});
    } else if (!is_fit) {
      refused.push_back({proposed.mark.donor, proposed.refusal, /*notify=*/true});
    }
    if (is_fit) {
      fit.push_back(std::move(proposed.mark));
    }
  }
  if (note_) {
    Watch(fit);
  }
  Donation donation;
  if (!donates && find_reach_) {
    registry.NoteAutoRefusal(gate.reason);
  } else if (donates && (find_reach_ || !fit.empty())) {
    try {
      donation = Plan(fit);
    } catch (const std::exception& error) {  // donates the marks without a plan
      registry.NoteAutoRefusal({ReasonCode::kPlanFailed, error.what()});
      donation = {};
      for (const PendingMark& mark : fit) {
        donation.offers.push_back({mark.donor});
      }
    }
  }
  // The executor donates a parameter whose info names an output. Any output works, because XLA pairs by size.
  const auto ours =
      donation.offers.empty() ? nullptr : std::make_shared<abi::DeviceDataInfo>(ids_.Any(), /*read_only=*/false);
  claim.rewritten_.reserve(donation.offers.size());
  const auto [step, tensors] = registry.Claim(donation.offers, std::move(refused), context_.after_backward_thread);
  // Nothing throws from here on, or XLA would get another graph than the one planned.
  for (std::size_t i = 0; step != nullptr && i < step->donors.size(); ++i) {
    const lazy::BackendDataPtr buffer = step->donors[i]->buffer.lock();
    if (!ids_.ReplacementOf(*buffer).has_value()) {
      claim.rewritten_.push_back({buffer, ours, nullptr});
      claim.rewritten_.back().before = abi::ReplaceInfo(*buffer, ours);
    }
  }
  if (donation.move.has_value()) {
    claim.moved_ = Apply(std::move(*donation.move), context_.roots, context_.collection);
  }
  recorded_ = step != nullptr;
  claim.step_ = recorded_ && !step->donors.empty() ? step : nullptr;
  claim.settled_ = std::move(donation.settled);
  ForgetCachedValues(tensors);
  if (recorded_ && !donates && !fit.empty()) {
    EndDryRun(fit, step->number);
  }
  return claim.step_ != nullptr || !claim.moved_.empty();
}

}  // namespace torch_xla_donate
