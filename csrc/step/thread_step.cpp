// The phases of a step.
#include "step/thread_step.h"

#include <c10/util/ScopeExit.h>

#include <atomic>
#include <exception>
#include <utility>

#include "host/tensors.h"
#include "registry/steps.h"
#include "registry/tallies.h"
#include "repairs/graph_wiring.h"
#include "step/callbacks.h"

namespace torch_xla_donate {

namespace {

// Without memory for the hash of the edges, a number that no other graph has keeps the graph from running as another.
lazy::hash_t WiringOf(const abi::Executor::PostOrderData& graph, const std::vector<lazy::Value>& roots) noexcept {
  static std::atomic<std::uint64_t> unique{0};
  try {
    return HashWiring(graph.post_order, roots);
  } catch (const std::bad_alloc& error) {
    Tallies::Get().NoteError(error.what());
    return lazy::MHash(unique.fetch_add(1, std::memory_order_relaxed));
  }
}

// Ends the marks that a step reads and does not donate after an error.
void RefuseUnclaimed(const abi::Executor::PostOrderData& graph) noexcept {
  try {
    RefuseMarks(graph, ReasonCode::kGivenUp, /*notify=*/true);
  } catch (const std::bad_alloc& error) {
    Tallies::Get().NoteError(error.what());
  }
}

// print(), .item() and .cpu() clear sync_ltc_data, a warm-up clears force_ltc_data. Only a step sets both.
bool RunsAll(const abi::Executor::SyncTensorCollection& collection) {
  return collection.config.force_ltc_data && collection.config.sync_ltc_data;
}

// Orders the thread that prepares a run before the thread of XLA that ends it. The queue between them does so, too, but
// ThreadSanitizer does not know the locks of XLA.
std::atomic<std::size_t> hand_overs{0};

Reason FailureOf(const std::exception& error) noexcept {
  try {
    return {ReasonCode::kFailed, error.what()};
  } catch (const std::bad_alloc&) {
    return ReasonCode::kFailedForeign;
  }
}

}  // namespace

class RunEnd {
 public:
  void Add(std::function<void(const Reason&)> function) { functions_.push_back(std::move(function)); }

  // Only the first call counts. The exchange orders it before the other one for ThreadSanitizer, too.
  void Call(const Reason& failure) noexcept {
    if (called_.exchange(true)) {
      return;
    }
    for (const auto& function : functions_) {
      try {
        function(failure);
      } catch (const std::exception& error) {  // the run itself has not failed
        Tallies::Get().NoteError(error.what());
      }
    }
    functions_.clear();  // with what they hold, as the host's run may live on
  }

 private:
  std::vector<std::function<void(const Reason&)>> functions_;
  std::atomic<bool> called_{false};
};

ThreadStep& ThreadStep::Make() {
  thread_local ThreadStep step;
  current_ = &step;
  return step;
}

void ThreadStep::Forget() noexcept {
  claim_ = nullptr;
  run_.reset();
  recorded_ = false;
  dry_run_.reset();
  phase_ = StepPhase::kIdle;
}

void ThreadStep::List(void* arena, const lazy::BackendDevice* device, c10::function_ref<void()> list) {
  Forget();
  list_.Reset(false);
  list_.Reset(phases::ListBegins(device));
  arena_ = arena;
  phase_ = StepPhase::kListing;
  const auto listed = c10::make_scope_exit([this] { phase_ = StepPhase::kListed; });
  list();
}

void ThreadStep::ProgramContinues() {
  phases::TensorMade();
  list_.Reset(false);  // its owner has finished
}

bool ThreadStep::IsListRead(const lazy::LazyTensor& tensor, bool holds_data) {
  if (!list_.IsKept()) {
    return false;
  }
  const abi::TensorData& data = *tensor.data();
  if (list_.IsListRead(data.unique_id, holds_data, [&data] { return abi::BufferOf(data) != nullptr; })) {
    return true;
  }
  list_.Reset(false);
  return false;
}

abi::Executor::PostOrderData ThreadStep::Order(const std::vector<lazy::Value>& roots,
                                               abi::Executor::SyncTensorCollection& collection,
                                               c10::function_ref<abi::Executor::PostOrderData()> order) {
  GraphContext context{roots, collection, RunsAll(collection), phase_ == StepPhase::kListed, false, false, {}};
  context.is_step = context.runs_all && list_.IsOfStep(roots.size());
  Forget();
  phase_ = StepPhase::kOrdering;
  const auto ordered = c10::make_scope_exit([this] { phase_ = StepPhase::kIdle; });
  phases::BeforeGraph(context);
  abi::Executor::PostOrderData graph = order();
  context.graph = &graph;
  GraphKnown(context);
  return graph;
}

void ThreadStep::GraphKnown(GraphContext& context) noexcept {
  context.collection.hash = lazy::HashCombine(context.collection.hash, WiringOf(*context.graph, context.roots));
  phases::GraphKnown(context);
  if (context.is_step) {
    try {
      ClaimDonors(context);
    } catch (const std::exception& error) {
      // such as out of memory: the step must continue, without donation
      Tallies::Get().NoteError(error.what());
      RefuseUnclaimed(*context.graph);
    }
  }
  list_.Reset(false);
}

void ThreadStep::ClaimDonors(GraphContext& context) {
  DonorSet donors(context, list_, arena_);
  phases::ProposeDonors(donors);
  if (donors.IsEmpty()) {
    return;
  }
  const auto claim = std::make_shared<Claim>();
  // A guard in the host's own stack frame, and then in its run. The host destroys it if it throws, or drops the run,
  // and after the run.
  lazy::ExceptionCleanup guard([claim](lazy::ExceptionCleanup::StatusType&&) {
    claim->Abandon(claim->IsCompiled() ? ReasonCode::kGivenUp : ReasonCode::kNotCompiled);
  });
  context.collection.unlocker.reserve(context.collection.unlocker.size() + 1);
  const bool is_claimed = donors.Commit(*claim);
  recorded_ = donors.IsRecorded();
  dry_run_ = std::move(context.dry_run);
  made_ = &context.collection;
  if (is_claimed) {
    claim_ = claim;
    context.collection.unlocker.push_back(std::move(guard));
  }
}

void ThreadStep::PassBarrier(abi::Executor::SyncTensorCollection& collection, c10::function_ref<void()> pass) {
  const std::shared_ptr<Claim> claim = made_ == &collection ? claim_ : nullptr;
  const bool is_claimed = claim != nullptr && !claim->IsCompiled();
  const std::size_t ours = is_claimed ? 1 : 0;  // our guard, see ClaimDonors()
  const bool has_locked_device = collection.unlocker.size() > ours;
  phases::AtBarrier(/*may_run_python=*/!has_locked_device && !is_claimed);
  if (phase_ != StepPhase::kOrdering) {
    list_.Reset(false);
  }
  if (!is_claimed) {
    pass();
    return;
  }
  claim->Compiled();
  // Takes our guard out meanwhile. If the executor already holds the device's lock, that entry comes before ours, and
  // the executor checks whether the list is empty.
  lazy::ExceptionCleanup guard = std::move(collection.unlocker.back());
  collection.unlocker.pop_back();
  try {
    pass();
  } catch (...) {
    claim->Abandon(ReasonCode::kEarlierStepFailed);  // the barrier rethrows that step's error; this step will not run
    throw;
  }
  collection.unlocker.push_back(std::move(guard));
}

void ThreadStep::Prepare(abi::Executor::Async& run, const abi::Executor::SyncTensorCollection& collection) noexcept {
  // The run owns the device's lock by now, and the caller of this constructor would not release it for an exception.
  try {
    run_.emplace(RunContext{run, RunsAll(collection)});
    if (made_ == &collection) {
      run_->recorded = std::exchange(recorded_, false);
      run_->dry_run = std::exchange(dry_run_, std::nullopt);
    }
    const std::shared_ptr<Claim> claim = std::exchange(claim_, nullptr);
    const bool has_donors = claim != nullptr && claim->HasDonors();  // else it has moved outputs only, or is over
    run_->claim = has_donors ? claim : nullptr;
    phases::BeforeRun(*run_);
    if (run_->stopped) {
      return;
    }
    if (has_donors) {
      claim->Commit(*run_, lazy::HashToString(collection.hash));
    } else if (run_->claim == nullptr) {
      Steps::Get().NoteRun(/*is_step=*/run_->runs_all && !run_->recorded);
    }
  } catch (...) {
    run_.emplace(RunContext{run, RunsAll(collection)}).failure = std::current_exception();
  }
}

void RunContext::OnEnd(std::function<void(const Reason& failure)> function) {
  if (end == nullptr) {
    auto made = std::make_shared<RunEnd>();
    // A guard in the host's run, which the host destroys after it, or if it never begins.
    run.unlocker.emplace_back([made](lazy::ExceptionCleanup::StatusType&&) { made->Call(ReasonCode::kGivenUp); });
    end = std::move(made);
  }
  end->Add(std::move(function));
}

std::function<void()> ThreadStep::Start(const lazy::MultiWait* runner, std::function<void()> run) {
  if (!run_.has_value() || &run_->run.mwait != runner) {
    return run;
  }
  RunContext context = std::move(*run_);
  run_.reset();
  if (context.failure != nullptr) {
    std::rethrow_exception(context.failure);
  }
  phases::AtStart(context);
  auto consumed = std::make_shared<std::vector<lazy::BackendDataPtr>>(Steps::Get().TakeConsumed(context.run.device));
  if (context.end == nullptr && consumed->empty()) {
    return run;
  }
  std::function<void()> completion = [run = std::move(run), end = context.end, consumed = std::move(consumed)] {
    hand_overs.load(std::memory_order_acquire);
    const auto ended = [&end](const Reason& failure) {
      if (end != nullptr) {
        end->Call(failure);
      }
    };
    try {
      run();
    } catch (const std::exception& error) {
      ended(FailureOf(error));
      throw;
    } catch (...) {
      ended(ReasonCode::kFailedForeign);
      throw;
    }
    ended({});
    consumed->clear();  // last, because it may wait for the run before
  };
  hand_overs.fetch_add(1, std::memory_order_release);
  return completion;
}

void ThreadStep::End(const lazy::BackendDevice& device) {
  list_.Reset(false);
  last_device = device;
  if (phases::AfterStep()) {
    callbacks::StepEnded();
  }
}

}  // namespace torch_xla_donate
