"""Knowledge of torch_xla's Python side and of torch's internals. csrc/host has that of the C++ side.

The import compares versions and installs the hooks, which checks names, slots and functions. The first mark verifies
the layouts on a probe tensor. A probe at import would start the XLA runtime before ``torch_xla.launch`` and
``xr.use_spmd``.
"""

from torch_xla_donate import _config
from torch_xla_donate._host import load

if not _config.IS_OFF:
    load.load()  # before anything imports `_C`

from torch_xla_donate._host.computations import call_computation, calling, computation_text, is_computation
from torch_xla_donate._host.dynamo import (
    CapturedFrame,
    captured_frame,
    compute_alone,
    compute_pending,
    global_hooks,
    has_hooks,
    hooks_of,
    let_operators_pass,
    wrapping_code,
)
from torch_xla_donate._host.graphs import (
    CompiledGraph,
    compile_graph,
    describe_graph,
    hlo_text,
    parameter_order,
    size_rule,
    is_evicted,
    run_graph,
    seeds_of,
)
from torch_xla_donate._host.hooks import install_hooks, uninstall_hooks, verify_layouts
from torch_xla_donate._host.jax import call_jax, import_jax, jax_environment, jit_donation, paired
from torch_xla_donate._host.loops import (
    accumulate,
    read,
    is_traced,
    one_scan,
    read_by_backward_scan,
    scan_layers,
)
from torch_xla_donate._host.load import build
from torch_xla_donate._host.repairs import PURE_COPIES
from torch_xla_donate._host.settings import (
    auto_sharding,
    autocast_state,
    ignores_donors,
    ignoring_donors,
    in_dual_level,
    in_eager_mode,
    is_ready,
    process_count,
    runtime,
    functions_of_a_step,
)
from torch_xla_donate._host.switches import (
    current_device,
    graph_name,
    is_refused_execution,
    on_device,
    run_step_closures,
    Tracing,
)
from torch_xla_donate._host.tensors import (
    array_of,
    computed,
    forget_pending,
    give_own_buffer,
    tensor_id,
    tensor_of_array,
    unwrapped,
    pending,
    op_sharding,
    placeholder,
    show_shardings,
    stand_in,
    same_buffer,
    seed_buffer,
    sharding_spec,
    shardings,
    tracked_views,
    transfers,
    with_dtype,
    without_wrapper,
)
