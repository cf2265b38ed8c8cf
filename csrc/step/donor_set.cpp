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

void ForgetCachedValues(const Donor& donor) {
  const lazy::BackendDataPtr buffer = donor.buffer.lock();
  for (const Holder& holder : donor.holders) {
    const std::shared_ptr<abi::TensorData> tensor = holder.tensor.lock();
    if (tensor != nullptr && buffer != nullptr && tensor->handle == buffer) {
      tensor->ir_value = lazy::Value();
      tensor->tensor_data.reset();
    }
  }
}

// ---- Claim ----

Claim::~Claim() {
  GiveInfosBack();
  ReleaseOutputs(moved_);
}

void Claim::GiveInfosBack() {
  for (RewrittenInfo& info : rewritten_) {
    if (info.buffer->info() == info.ours.get()) {
      info.buffer->SetInfo(std::move(info.before));
    }
  }
  rewritten_.clear();
}

void Claim::Compiled() {
  compiled_ = true;
  GiveInfosBack();
}

void Claim::Abandon(const Reason& why) {
  GiveInfosBack();
  ReleaseOutputs(moved_);
  if (const StepPtr step = std::exchange(step_, nullptr)) {
    DonationRegistry::Get().Abandon(step, why);
  }
}

void Claim::Commit(RunContext& run, std::string graph_hash) {
  run.graph = graph_hash;
  DonationRegistry::Get().Commit(step_, std::move(graph_hash), run.run.tensors_data);
  run.OnEnd([step = step_, settled = settled_](const Reason& failure) {
    DonationRegistry::Get().Settle(step, failure);
    if (failure.empty() && settled) {
      settled();
    }
  });
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
  for (const abi::TensorData* output : outputs_) {
    ids_.Add(*output);
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
  for (const Asked& asked : asked_) {
    buffers.push_back(asked.buffer.get());
  }
  std::vector<BufferHolder> holders;
  for (const auto& data : live_) {
    if (!asked_.empty() && data != nullptr && data->handle != nullptr) {
      holders.push_back({data.get(), data->handle.get(), abi::HasView(*data)});
    }
  }
  const auto obstacles = FindObstacles(buffers, holders, [this](std::size_t i, const void* tensor) {
    return asked_[i].donor->HeldBy(static_cast<const abi::TensorData*>(tensor));
  });
  for (std::size_t i = 0; i < asked_.size(); ++i) {
    asked_[i].refusal = ReasonOf(obstacles[i]);
    const abi::DeviceDataInfo* info = abi::InfoOf(*asked_[i].buffer);
    if (asked_[i].refusal.empty() && info != nullptr && info->read_only) {
      asked_[i].refusal = ReasonCode::kConstant;
    }
  }
}

DonorSet::DonorsByBuffer DonorSet::ByBuffer(const std::vector<DonorPtr>& donors) {
  DonorsByBuffer result;
  for (const DonorPtr& donor : donors) {
    result.emplace(donor->buffer.lock().get(), donor);
  }
  return result;
}

// The planner's request. Without `reach` no unmarked input may become a donor.
PlanRequest DonorSet::Request(const DonorsByBuffer& donor_of, const std::optional<Liveness>& reach) const {
  const abi::Executor::PostOrderData& graph = *context_.graph;
  const lazy::BackendDevice& device = context_.collection.device;
  const std::size_t count = graph.parameters_data.size();
  std::unordered_map<const abi::TensorData*, std::size_t> output_of_tensor;
  for (std::size_t i = 0; i < outputs_.size(); ++i) {
    output_of_tensor.emplace(outputs_[i], i);
  }
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
  for (std::size_t i = 0; i < count; ++i) {
    const lazy::BackendData& buffer = *graph.parameters_data[i];
    const abi::DeviceDataInfo* info = abi::InfoOf(buffer);
    const auto own = ids_.ReplacementOf(buffer);
    request.own[i] = own.has_value();
    if (const auto found = donor_of.find(&buffer); found != donor_of.end()) {
      request.donors[i] = true;
      const auto target = output_of_tensor.find(found->second->Target().get());
      request.wanted[i] = target != output_of_tensor.end() ? std::optional(target->second) : own;
    } else if (info == nullptr ? buffer.info() != nullptr : info->read_only) {
      request.barred[i] = true;
    } else if (own.has_value()) {
      request.donors[i] = true;
      request.wanted[i] = own;
    }
    if (!(buffer.device() == device)) {
      request.barred[i] = true;
    }
  }
  return request;
}

// Adds the inputs that the planner chooses to the marks. Orders parameters and outputs so that XLA gives each donor to
// the output computed from it. Returns all donors in the order of the parameters.
std::vector<DonorPtr> DonorSet::Plan(const std::vector<DonorPtr>& marks, Claim& claim) {
  abi::Executor::PostOrderData& graph = *context_.graph;
  DonorsByBuffer donor_of = ByBuffer(marks);
  const PlanRequest request = Request(donor_of, find_reach_ ? find_reach_(*this) : std::nullopt);
  const PlanResult result = DonorPlanner::Get().Choose(request);
  const DonorChoice& choice = *result.choice;
  std::vector<DonorPtr> inputs;
  for (std::size_t i = 0; i < choice.pairs.chosen.size(); ++i) {
    const lazy::BackendDataPtr& buffer = graph.parameters_data[choice.pairs.chosen[i]];
    auto donor = std::make_shared<Donor>(*choice.prototypes[i]);
    donor->device = context_.collection.device;  // another device may have had this graph before
    donor->buffer = buffer;
    inputs.push_back(donor);
    donor_of.emplace(buffer.get(), std::move(donor));
  }
  if (settled_ && !inputs.empty()) {
    claim.settled_ = [settled = settled_, result, inputs = std::move(inputs)] { settled(result, inputs); };
  }
  claim.moved_ = MoveOutputs(choice.pairs.output_order, context_.roots, live_, context_.collection);
  std::vector<std::size_t> place_of(context_.roots.size());
  for (std::size_t place = 0; place < place_of.size(); ++place) {
    place_of[claim.moved_.empty() ? place : choice.pairs.output_order[place]] = place;
  }
  const std::size_t count = graph.parameters_data.size();
  for (std::size_t i = 0; i < count; ++i) {
    const auto successor = choice.pairs.successor[i];
    if (const auto found = donor_of.find(graph.parameters_data[i].get()); found != donor_of.end() && successor) {
      found->second->successor = place_of[*successor];
    }
  }
  PutFirst(choice.pairs.parameter_order, graph, context_.collection);
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

// The executor donates a parameter whose info names an output. Any output works, because XLA pairs by size.
void DonorSet::Rewrite(const std::vector<DonorPtr>& donors, Claim& claim) const {
  const auto ours = donors.empty() ? nullptr : std::make_shared<abi::DeviceDataInfo>(ids_.Any(), false);
  claim.rewritten_.reserve(donors.size());
  for (const DonorPtr& donor : donors) {
    const lazy::BackendDataPtr buffer = donor->buffer.lock();
    if (!ids_.ReplacementOf(*buffer).has_value()) {
      claim.rewritten_.push_back({buffer, ours, nullptr});
      claim.rewritten_.back().before = buffer->SetInfo(ours);
    }
  }
}

void DonorSet::EndDryRun(const std::vector<DonorPtr>& donors, std::uint64_t step) const {
  const std::vector<lazy::BackendDataPtr>& parameters = context_.graph->parameters_data;
  const DonorsByBuffer donor_of = ByBuffer(donors);
  const PlanResult plan = DonorPlanner::Get().Choose(Request(donor_of, /*reach=*/std::nullopt));
  DryRun result{&context_.collection, step, {}};
  std::vector<bool> added(parameters.size());
  const auto add = [&](std::size_t i) {
    const auto found = donor_of.find(parameters[i].get());
    const bool is_asked = found != donor_of.end();
    if (!added[i] && (is_asked || ids_.ReplacementOf(*parameters[i]).has_value())) {
      result.parameters.push_back({parameters[i], is_asked ? found->second : nullptr});
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
void DonorSet::Watch(const std::vector<DonorPtr>& marks) const {
  const std::optional<Liveness> reach = find_watched_(*this);
  if (!reach.has_value() || outputs_.empty()) {
    return;
  }
  std::vector<std::int64_t> outputs;
  std::transform(outputs_.begin(), outputs_.end(), std::back_inserter(outputs),
                 [](const abi::TensorData* output) { return abi::AliasId(*output); });
  note_(Request(ByBuffer(marks), reach), outputs, context_.gate.reason);
}

std::shared_ptr<Claim> DonorSet::Commit() {
  if (asked_.empty() && !find_reach_ && !note_) {
    return nullptr;
  }
  FindOutputs();
  Triage();
  DonationRegistry& registry = DonationRegistry::Get();
  const Gate& gate = context_.gate;
  const bool donates = gate.verdict == Gate::Verdict::kDonate;
  std::vector<DonorPtr> fit;
  std::vector<DonationRegistry::Refusal> refused;
  for (const Asked& asked : asked_) {
    const bool is_fit = asked.refusal.empty() && gate.verdict != Gate::Verdict::kRefuse;
    if (is_fit) {
      fit.push_back(asked.donor);
    }
    if (!donates) {
      refused.push_back({asked.donor, gate.reason, gate.notify});
    } else if (!is_fit) {
      refused.push_back({asked.donor, asked.refusal, /*notify=*/true});
    }
  }
  if (note_) {
    Watch(fit);
  }
  const auto claim = std::make_shared<Claim>();
  std::vector<DonorPtr> donors;
  if (!donates && find_reach_) {
    registry.NoteAutoRefusal(gate.reason);
  } else if (donates && (find_reach_ || !fit.empty())) {
    try {
      donors = Plan(fit, *claim);
    } catch (const std::exception& error) {  // donates the marks without a plan
      donors = fit;
      registry.NoteAutoRefusal({ReasonCode::kPlanFailed, error.what()});
    }
    Rewrite(donors, *claim);
  }
  if (!donors.empty() || !refused.empty()) {
    const StepPtr step = registry.Claim(std::move(donors), std::move(refused), context_.after_backward_thread);
    recorded_ = true;
    if (!donates && !fit.empty()) {
      EndDryRun(fit, step->number);
    }
    claim->step_ = step->donors.empty() ? nullptr : step;
  }
  if (claim->step_ == nullptr && claim->moved_.empty()) {
    return nullptr;
  }
  for (const DonorPtr& donor : fit) {
    ForgetCachedValues(*donor);
  }
  return claim;
}

}  // namespace torch_xla_donate
