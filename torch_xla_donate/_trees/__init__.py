"""The leaves of arguments, and their names."""

from torch_xla_donate._trees.exact import exact, same, structure_key
from torch_xla_donate._trees.leaves import (
    first_off_device,
    flatten,
    flatten_fast,
    named_leaves,
    refuse_depth,
    tensors_in,
    with_places,
)
from torch_xla_donate._trees.names import (
    IndexNames,
    Names,
    Places,
    dtype_and_shape,
    has_keys,
    qualified_name,
)
