// The phases of a step.
#include "step/thread_step.h"

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

}  // namespace

ThreadStep& ThreadStep::Make() {
  thread_local ThreadStep step;
  current_ = &step;
  return step;
}

void ThreadStep::GiveUp(const Reason& why) noexcept {
  run_.reset();
  failed_run_ = nullptr;
  failure_ = nullptr;
  if (const std::shared_ptr<Claim> claim = std::exchange(claim_, nullptr)) {
    claim->Abandon(why);
  }
  recorded_ = false;
  phase_ = StepPhase::kIdle;
}

ThreadStep::Listing::Listing(void* arena, const lazy::BackendDevice* device) {
  ThreadStep& step = Get();
  step.GiveUp();
  step.list_.Reset(false);
  step.list_.Reset(phases::ListBegins(device));
  step.arena_ = arena;
  step.phase_ = StepPhase::kListing;
}

ThreadStep::Listing::~Listing() { Get().phase_ = StepPhase::kListed; }

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

ThreadStep::Graph::Graph(const lazy::LazyGraphExecutor& executor, const std::vector<lazy::Value>& roots,
                         abi::Executor::SyncTensorCollection& collection)
    : context_{executor, roots, collection, RunsAll(collection), false, false, {}} {
  ThreadStep& step = Get();
  context_.follows_list = step.phase_ == StepPhase::kListed;
  context_.is_step = context_.runs_all && step.list_.IsOfStep(roots.size());
  step.GiveUp();
  step.phase_ = StepPhase::kOrdering;
  phases::BeforeGraph(context_);
}

void ThreadStep::Graph::Known(abi::Executor::PostOrderData& graph) noexcept {
  context_.graph = &graph;
  context_.collection.hash = lazy::HashCombine(context_.collection.hash, WiringOf(graph, context_.roots));
  phases::GraphKnown(context_);
  if (context_.is_step) {
    try {
      Get().ClaimDonors(context_);
    } catch (const std::exception& error) {
      // such as out of memory: the step must continue, without donation
      Tallies::Get().NoteError(error.what());
      Get().GiveUp();
      RefuseUnclaimed(graph);
    }
  }
  Get().list_.Reset(false);
}

ThreadStep::Graph::~Graph() {
  ThreadStep& step = Get();
  step.phase_ = step.claim_ != nullptr ? StepPhase::kClaimed : StepPhase::kIdle;
}

void ThreadStep::ClaimDonors(GraphContext& context) {
  DonorSet donors(context, list_, arena_);
  donors.ProposeMarks();  // marks come first
  phases::ProposeDonors(donors);
  if (donors.IsEmpty()) {
    return;
  }
  const auto claim = std::make_shared<Claim>();
  // A guard in the host's own stack frame. If the host throws before the step is scheduled, it destroys the collection.
  context.collection.unlocker.emplace_back([claim](lazy::ExceptionCleanup::StatusType&&) {
    if (!claim->IsCompiled()) {
      ThreadStep& step = Get();
      if (step.claim_ == claim) {
        step.GiveUp(ReasonCode::kNotCompiled);
      }
      claim->Abandon(ReasonCode::kNotCompiled);
    }
  });
  bool is_claimed = false;
  try {
    is_claimed = donors.Commit(*claim);
  } catch (...) {
    context.collection.unlocker.pop_back();
    throw;
  }
  recorded_ = donors.IsRecorded();
  if (is_claimed) {
    claim_ = claim;
  } else {
    context.collection.unlocker.pop_back();
  }
}

void ThreadStep::PassBarrier(const lazy::LazyGraphExecutor& executor, abi::Executor::SyncTensorCollection& collection,
                             const std::function<void()>& pass) {
  const std::size_t ours = phase_ == StepPhase::kClaimed ? 1 : 0;  // our guard, see ClaimDonors()
  const bool has_locked_device = collection.unlocker.size() > ours;
  phases::AtBarrier(executor, has_locked_device);
  if (phase_ != StepPhase::kOrdering) {
    list_.Reset(false);
  }
  if (phase_ != StepPhase::kClaimed) {
    pass();
    return;
  }
  phase_ = StepPhase::kCompiled;
  const std::shared_ptr<Claim> claim = claim_;
  claim->Compiled();
  // Removes our guard. If the executor already holds the device's lock, that entry comes before ours, and the executor
  // checks whether the list is empty.
  collection.unlocker.pop_back();
  try {
    pass();
  } catch (...) {
    GiveUp(ReasonCode::kEarlierStepFailed);  // the barrier rethrows that step's error; this step will not run
    throw;
  }
  claim->Scheduled();
  if (!claim->HasDonors()) {
    claim_ = nullptr;
    phase_ = StepPhase::kIdle;
  }
}

void ThreadStep::Prepare(abi::Executor::Async& run, const abi::Executor::SyncTensorCollection& collection) noexcept {
  // The run owns the device's lock by now, and the caller of this constructor would not release it for an exception.
  try {
    run_.emplace(RunContext{run, &collection, RunsAll(collection)});
    run_->recorded = std::exchange(recorded_, false);
    if (phase_ == StepPhase::kCompiled) {
      run_->claim = claim_;
    }
    phases::BeforeRun(*run_);
    if (run_->failure != nullptr) {
      std::rethrow_exception(run_->failure);
    }
    if (run_->stopped) {
      return;
    }
    if (phase_ == StepPhase::kCompiled) {
      claim_->Commit(*run_, lazy::HashToString(collection.hash));
    } else if (run_->claim != nullptr) {
      claim_ = run_->claim;
    } else {
      Steps::Get().NoteRun(/*is_step=*/run_->runs_all && !run_->recorded);
    }
    phase_ = StepPhase::kPrepared;
  } catch (...) {
    GiveUp();
    failed_run_ = &run.mwait;
    failure_ = std::current_exception();
  }
}

namespace {

// The functions to call at the end of a run. If the host drops the run, its end counts as given up.
class RunEnd {
 public:
  explicit RunEnd(std::vector<std::function<void(const Reason&)>> functions) : functions_(std::move(functions)) {}
  ~RunEnd() { Call(ReasonCode::kGivenUp); }
  RunEnd(const RunEnd&) = delete;
  RunEnd& operator=(const RunEnd&) = delete;

  // Only the first call counts.
  void Call(const Reason& failure) noexcept {
    for (const auto& function : functions_) {
      try {
        function(failure);
      } catch (const std::exception& error) {  // the run itself has not failed
        Tallies::Get().NoteError(error.what());
      }
    }
    functions_.clear();
  }

 private:
  std::vector<std::function<void(const Reason&)>> functions_;
};

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

std::function<void()> ThreadStep::Start(const lazy::MultiWait* runner, std::function<void()> run) {
  if (failed_run_ == runner && failure_ != nullptr) {
    failed_run_ = nullptr;
    std::rethrow_exception(std::exchange(failure_, nullptr));
  }
  if (!run_.has_value() || &run_->run.mwait != runner) {
    return run;
  }
  RunContext context = std::move(*run_);
  run_.reset();
  claim_ = nullptr;
  phase_ = StepPhase::kIdle;
  try {
    phases::AtStart(context);
    if (context.claim != nullptr) {
      context.claim->NoteExecutable(context.run);
    }
    auto consumed = std::make_shared<std::vector<lazy::BackendDataPtr>>(Steps::Get().TakeConsumed(context.run.device));
    if (context.ends.empty() && consumed->empty()) {
      return run;
    }
    const auto end = std::make_shared<RunEnd>(std::move(context.ends));
    std::function<void()> completion = [run = std::move(run), end, consumed = std::move(consumed)] {
      hand_overs.load(std::memory_order_acquire);
      try {
        run();
      } catch (const std::exception& error) {
        end->Call(FailureOf(error));
        throw;
      } catch (...) {
        end->Call(ReasonCode::kFailedForeign);
        throw;
      }
      end->Call({});
      consumed->clear();  // last, because it may wait for the run before
    };
    hand_overs.fetch_add(1, std::memory_order_release);
    return completion;
  } catch (...) {
    if (context.claim != nullptr) {
      context.claim->Abandon(ReasonCode::kGivenUp);
    }
    throw;
  }
}

void ThreadStep::End(const lazy::BackendDevice& device) {
  list_.Reset(false);
  last_device = device;
  if (phases::AfterStep()) {
    callbacks::StepEnded();
  }
}

}  // namespace torch_xla_donate
