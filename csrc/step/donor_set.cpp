// Turns the proposals for a step into its claim; donor_set.h describes the order.
#include "step/donor_set.h"

#include <algorithm>
#include <iterator>

#include "host/address_numbers.h"
#include "host/graphs.h"
#include "host/tensors.h"

namespace torch_xla_donate {

namespace {

// By mark: why its buffer cannot be donated, because a live tensor is a view, has views, or holds the buffer without a
// mark; empty if none does. Linear in both lists.
std::vector<Reason> FindObstacles(const std::vector<Marks::PendingMark>& marks,
                                  const std::vector<std::shared_ptr<abi::TensorData>>& live) {
  AddressNumbers mark_of(marks.size());
  for (const Marks::PendingMark& mark : marks) {
    mark_of.Add(mark.donor->array.key);
  }
  std::vector<Reason> obstacles(marks.size());
  for (const auto& data : live) {
    const void* buffer = data == nullptr           ? nullptr
                         : data->handle != nullptr ? data->handle.get()
                                                   : abi::BufferOf(*data).get();
    const std::uint32_t i = mark_of.Of(buffer);
    if (i == AddressNumbers::kUnknown) {
      continue;
    }
    const auto& marked = marks[i].tensors;
    if (abi::HasView(*data)) {
      obstacles[i] = ReasonCode::kHasViews;
    } else if (std::find(marked.begin(), marked.end(), data) == marked.end()) {
      obstacles[i] = ReasonCode::kHeldByOthers;
    }
  }
  return obstacles;
}

}  // namespace

void ForgetCachedValues(const std::vector<std::shared_ptr<abi::TensorData>>& tensors) noexcept {
  for (const std::shared_ptr<abi::TensorData>& tensor : tensors) {
    tensor->ir_value = lazy::Value();
    tensor->tensor_data.reset();
  }
}

void RefuseMarks(const abi::Executor::PostOrderData& graph, const Reason& reason, bool notify) {
  std::vector<Refusal> refused;
  for (const auto& mark : Marks::Get().Among(graph.parameters_data)) {
    refused.push_back({mark.donor, reason, notify});
  }
  if (!refused.empty()) {
    Steps::Get().Claim({}, std::move(refused));
  }
}

// ---- Claim ----

void Claim::RestoreInfos() noexcept {
  if (rewritten_.empty()) {
    return;
  }
  std::vector<RewrittenInfo> rewritten = std::move(rewritten_);  // released without the lock
  rewritten_.clear();
  const abi::InfosLocked infos;
  for (RewrittenInfo& info : rewritten) {
    if (info.buffer->info() == ours_.get()) {  // unless the executor has replaced it
      info.buffer->SetInfo(std::move(info.before));
    }
  }
}

void Claim::Compiled() {
  compiled_ = true;
  RestoreInfos();
  moved_.clear();
}

void Claim::Abandon(const Reason& why) noexcept {
  compiled_ = true;  // or never will be
  RestoreInfos();
  ReleaseOutputs(moved_);
  if (const StepPtr step = std::exchange(step_, nullptr)) {
    Steps::Get().Abandon(step, why);
  }
}

void Claim::Commit(RunContext& run, std::string graph_hash) {
  run.graph = graph_hash;
  Steps::Get().Commit(step_, std::move(graph_hash), run.run.tensors_data);
  run.OnEnd([step = step_, on_success = on_success_](const Reason& failure) {
    if (failure.code == ReasonCode::kGivenUp) {  // the run has not begun
      Steps::Get().Abandon(step, failure);
      return;
    }
    Steps::Get().RecordOutcome(step, failure);
    if (failure.empty() && on_success) {
      on_success();
    }
  });
}

void Claim::CommitCompiled(RunContext& run, const std::vector<Steps::Offer>& offers, std::string graph_hash) {
  auto [step, tensors] = Steps::Get().Claim(offers, {});
  if (step == nullptr) {
    return;
  }
  step_ = std::move(step);
  ForgetCachedValues(tensors);
  try {
    Commit(run, std::move(graph_hash));
  } catch (...) {
    Abandon(ReasonCode::kGivenUp);
    throw;
  }
}

// ---- DonorSet ----

// The executor has just cleared the graph of each output's tensor (a placeholder will follow). So an output is a live
// tensor at one of the collection's indices that holds nothing. Leaves outputs_ empty if any of them does not match.
void DonorSet::FindOutputs() {
  live_ = list_.Arrange(abi::TensorsOf(arena_, context_.collection.device));
  const std::vector<std::size_t>& indices = context_.collection.indices;
  const auto tensor_at = [this](std::size_t index) { return index < list_.Size() ? live_[index].get() : nullptr; };
  const auto is_output = [&tensor_at](std::size_t index) {
    const abi::TensorData* data = tensor_at(index);
    return data != nullptr && data->handle == nullptr && !data->ir_value;
  };
  if (indices.size() == context_.roots.size() && std::all_of(indices.begin(), indices.end(), is_output)) {
    std::transform(indices.begin(), indices.end(), std::back_inserter(outputs_), tensor_at);
  }
  place_of_id_.reserve(outputs_.size());
  for (std::size_t i = 0; i < outputs_.size(); ++i) {
    place_of_id_.emplace(abi::AliasId(*outputs_[i]), i);
  }
  if (outputs_.empty()) {
    context_.gate.Refuse(ReasonCode::kUnmatched, /*notify_user=*/true);
  }
}

std::optional<std::size_t> DonorSet::NumberOf(const abi::TensorData* output) const {
  const auto first = output == nullptr ? place_of_id_.end() : place_of_id_.find(abi::AliasId(*output));
  const std::size_t place = first == place_of_id_.end() ? outputs_.size() : first->second;
  const auto found = std::find(std::next(outputs_.begin(), static_cast<std::ptrdiff_t>(place)), outputs_.end(), output);
  return found == outputs_.end() ? std::nullopt : std::optional<std::size_t>(found - outputs_.begin());
}

void DonorSet::Triage() {
  if (context_.gate.verdict == Gate::Verdict::kRefuse || marks_.empty()) {
    return;
  }
  refusals_ = FindObstacles(marks_, live_);
  const abi::InfosLocked infos;
  for (std::size_t i = 0; i < marks_.size(); ++i) {
    const auto info = infos.Of(*context_.graph->parameters_data[marks_[i].position]);
    if (refusals_[i].empty() && info.has_value() && info->read_only) {
      refusals_[i] = ReasonCode::kConstant;
    }
  }
}

void DonorSet::Prepare() {
  if (!prepared_) {
    prepared_ = true;
    FindOutputs();
    Triage();
  }
}

const std::vector<std::shared_ptr<abi::TensorData>>& DonorSet::Live() {
  Prepare();
  return live_;
}

std::vector<std::int64_t> DonorSet::OutputIds() {
  Prepare();
  std::vector<std::int64_t> ids;
  std::transform(outputs_.begin(), outputs_.end(), std::back_inserter(ids),
                 [](const abi::TensorData* output) { return abi::AliasId(*output); });
  return ids;
}

StepFacts DonorSet::Facts(const std::optional<Liveness>& reach) {
  Prepare();
  const abi::Executor::PostOrderData& graph = *context_.graph;
  const lazy::BackendDevice& device = context_.collection.device;
  StepFacts facts{graph,
                  context_.roots,
                  device,
                  context_.collection.hash,
                  /*sharded=*/abi::IsSpmd(device),
                  /*automatic=*/reach.has_value(),
                  std::vector<PlanInput>(graph.parameters_data.size())};
  for (std::size_t i = 0; i < marks_.size(); ++i) {
    PlanInput& input = facts.inputs[marks_[i].position];
    input.is_marked = refusals_[i].empty();
    if (input.is_marked) {
      input.preferred_output = NumberOf(marks_[i].preferred_output.get());
    }
  }
  const abi::InfosLocked infos;
  for (std::size_t i = 0; i < facts.inputs.size(); ++i) {
    PlanInput& input = facts.inputs[i];
    if (reach.has_value()) {
      input.is_held = reach->Held()[i];
      input.is_read_later = reach->Read()[i];
    }
    const lazy::BackendData& buffer = *graph.parameters_data[i];
    const std::optional<abi::DeviceDataInfo> info = infos.Of(buffer);
    // torch_xla notes an info on the data of tensors. The random seed has none.
    const bool is_constant = !info.has_value() || info->read_only;
    const auto replacement = is_constant ? place_of_id_.end() : place_of_id_.find(info->tensor_id);
    if (replacement != place_of_id_.end()) {
      input.is_updated_in_place = true;
      input.preferred_output = input.preferred_output.value_or(replacement->second);
    }
    input.is_barred = (is_constant && !input.is_marked) || !(buffer.device() == device);
  }
  return facts;
}

// Adds the inputs that the planner chooses to the marks. Orders the parameters, and prepares an order of the outputs,
// so that XLA gives each donor to the output computed from it.
DonorSet::Donation DonorSet::Plan() {
  abi::Executor::PostOrderData& graph = *context_.graph;
  const StepFacts facts = Facts(reach_);
  const PlanResult result = DonorPlanner::Get().Choose(facts);
  const DonorChoice& choice = *result.choice;
  const std::size_t count = graph.parameters_data.size();
  Donation donation;
  std::vector<Steps::Offer> offers;
  std::vector<std::size_t> offer_at(count, count);  // by parameter; `count` if it is not offered
  offers.reserve(choice.pairs.chosen.size() + marks_.size());
  std::vector<DonorPtr> automatic_donors;
  for (std::size_t i = 0; i < choice.pairs.chosen.size(); ++i) {
    const lazy::BackendDataPtr& buffer = graph.parameters_data[choice.pairs.chosen[i]];
    DonorArray array(buffer, choice.sizes[i]);
    array.automatic = true;
    automatic_donors.push_back(std::make_shared<Donor>(buffer, std::move(array)));
    offer_at[choice.pairs.chosen[i]] = offers.size();
    offers.push_back({automatic_donors.back()});
  }
  donation.move = PrepareMove(choice.pairs.output_order, context_.roots, live_, context_.collection);
  std::vector<std::size_t> place_of(context_.roots.size());
  for (std::size_t place = 0; place < place_of.size(); ++place) {
    place_of[donation.move.has_value() ? choice.pairs.output_order[place] : place] = place;
  }
  for (std::size_t i = 0; i < marks_.size(); ++i) {
    if (refusals_[i].empty()) {
      offer_at[marks_[i].position] = offers.size();
      offers.push_back({marks_[i].donor});
      if (const auto output = NumberOf(marks_[i].preferred_output.get())) {
        offers.back().requested = place_of[*output];
      }
    }
  }
  if (facts.sharded && !automatic_donors.empty()) {
    donation.on_success = [result, donors = std::move(automatic_donors)] { DonorPlanner::Get().Learn(result, donors); };
  }
  donation.offers.reserve(offers.size());
  donation.is_own.reserve(offers.size());
  const std::vector<std::size_t>& order = choice.pairs.parameter_order;
  const bool moved = PermuteParameters(order, graph, context_.collection);
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t old = moved ? order[i] : i;
    if (offer_at[old] == count) {
      continue;
    }
    Steps::Offer& offer = offers[offer_at[old]];
    offer.parameter = i;
    if (const auto output = choice.pairs.preferred_output[old]) {
      offer.preferred_output = place_of[*output];
    }
    donation.offers.push_back(std::move(offer));
    donation.is_own.push_back(facts.inputs[old].is_updated_in_place);
  }
  return donation;
}

void DonorSet::EndDryRun(std::uint64_t step) {
  const std::vector<lazy::BackendDataPtr>& parameters = context_.graph->parameters_data;
  const StepFacts facts = Facts(/*reach=*/std::nullopt);
  const PlanResult plan = DonorPlanner::Get().Choose(facts);
  std::vector<DonorPtr> donor_at(parameters.size());
  for (const Marks::PendingMark& mark : marks_) {
    donor_at[mark.position] = mark.donor;
  }
  DryRun result{step, {}};
  for (const std::size_t i : plan.choice->pairs.parameter_order) {
    if (facts.inputs[i].IsDonor()) {
      result.parameters.emplace_back(SizeOf(abi::DescribeBuffer(*parameters[i]), /*unsharded=*/false),
                                     facts.inputs[i].is_marked ? donor_at[i] : nullptr);
    }
  }
  context_.dry_run = std::move(result);
}

// The executor donates a parameter whose info names an output. Any output works, because XLA pairs by size.
void DonorSet::RewriteInfos(const Donation& donation, const StepPtr& step, Claim& claim) const noexcept {
  if (step == nullptr) {
    return;
  }
  const abi::InfosLocked infos;
  std::size_t offer = 0;
  for (const DonorPtr& donor : step->donors) {
    while (donation.offers[offer].donor != donor) {  // another thread has cancelled its mark
      ++offer;
    }
    if (!donation.is_own[offer]) {
      const lazy::BackendDataPtr buffer = donor->buffer.lock();
      claim.rewritten_.push_back({buffer, nullptr});
      claim.rewritten_.back().before = buffer->SetInfo(claim.ours_);
    }
  }
}

bool DonorSet::Commit(Claim& claim) {
  Prepare();
  const Gate& gate = context_.gate;
  const bool donates = gate.verdict == Gate::Verdict::kDonate;
  bool has_marks = false;  // that may be donated
  std::vector<Refusal> refused;
  for (std::size_t i = 0; i < marks_.size(); ++i) {
    if (!donates) {
      refused.push_back({marks_[i].donor, gate.reason, gate.notify});
    } else if (!refusals_[i].empty()) {
      refused.push_back({marks_[i].donor, refusals_[i], /*notify=*/true});
    }
    has_marks = has_marks || refusals_[i].empty();
  }
  Donation donation;
  if (donates && (offers_inputs_ || has_marks)) {
    donation = Plan();
  }
  claim.ours_ =
      donation.offers.empty() ? nullptr : std::make_shared<abi::DeviceDataInfo>(abi::AliasId(*outputs_.front()), false);
  claim.rewritten_.reserve(donation.offers.size());
  const auto [step, tensors] = Steps::Get().Claim(donation.offers, std::move(refused));
  // Nothing throws from here on, or XLA would get another graph than the one planned. Only EndDryRun() may: a dry run
  // rewrites nothing.
  RewriteInfos(donation, step, claim);
  if (donation.move.has_value()) {
    claim.moved_ = Apply(std::move(*donation.move), context_.roots, context_.collection);
  }
  recorded_ = step != nullptr;
  claim.step_ = recorded_ && !step->donors.empty() ? step : nullptr;
  claim.on_success_ = std::move(donation.on_success);
  ForgetCachedValues(tensors);
  if (recorded_ && gate.verdict == Gate::Verdict::kDryRun && has_marks) {
    EndDryRun(step->number);
  }
  return claim.step_ != nullptr || !claim.moved_.empty();
}

}  // namespace torch_xla_donate
