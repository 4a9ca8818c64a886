"""ctypes over clover.h: the library, its structs (field by field as in the header) and its error codes."""

import contextlib
import ctypes as c
import functools
import os
import pathlib
import sys

from . import errors

NAMES = {"darwin": "libclover.dylib", "win32": "clover.dll"}
PACKAGED = pathlib.Path(__file__).parent / "lib"
BUILT = pathlib.Path(__file__).parents[2] / "build" / "lib"

ERRORS = {
    1: errors.ArgumentError,
    2: errors.ModelFileError,
    3: errors.UnsupportedError,
    4: errors.ContextFullError,
    5: errors.ResourceError,
    6: errors.BusyError,
    7: errors.EngineError,
}
API_NUMBER = 1  # CLOVER_API_NUMBER of the header that this module describes
FAILED = -(2**31)  # of the functions that return a count

# GNU OpenMP's threads spin at every barrier, which costs a hundredfold where another program wants a core too. Measured with
# two threads on two busy cores: default 1.4 s a pass, 1,000 turns 0.02 s. It reads this once, as it is loaded.
SPIN = "GOMP_SPINCOUNT", "1000"

MODES = {"block": 0, "ar": 1}
PASSES = {"block": 0, "causal": 1}
KV_TYPES = {"f16": 0, "f32": 1, "q8_0": 2}
FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}
FINISH = (None, "stop", "stop_string", "length", "cancelled")


class ModelParams(c.Structure):
    """struct clover_model_params."""

    _fields_ = [("size", c.c_size_t), ("n_gpu_layers", c.c_int32), ("use_mmap", c.c_bool), ("check_tensors", c.c_bool)]


class ModelInfo(c.Structure):
    """struct clover_model_info."""

    _fields_ = [
        ("size", c.c_size_t),
        ("n_vocab", c.c_int32),
        ("n_ctx_train", c.c_int32),
        ("can_block", c.c_bool),
        ("block_size", c.c_int32),
        ("threshold", c.c_float),
        ("shift_logits", c.c_bool),
        ("mask_token", c.c_int32),
        ("eos_token", c.c_int32),
        ("n_params", c.c_uint64),
        ("n_bytes", c.c_uint64),
    ]


class SessionParams(c.Structure):
    """struct clover_session_params."""

    _fields_ = [
        ("size", c.c_size_t),
        ("n_ctx", c.c_int32),
        ("n_batch", c.c_int32),
        ("n_threads", c.c_int32),
        ("kv_type", c.c_int32),
        ("flash_attn", c.c_int32),
        ("imatrix", c.c_void_p),
    ]


class ImatrixEntry(c.Structure):
    """struct clover_imatrix_entry."""

    _fields_ = [
        ("size", c.c_size_t),
        ("name", c.c_char_p),
        ("n_columns", c.c_int64),
        ("n_matrices", c.c_int64),
        ("sums", c.POINTER(c.c_float)),
        ("counts", c.POINTER(c.c_int64)),
    ]


class Step(c.Structure):
    """struct clover_step."""

    _fields_ = [
        ("size", c.c_size_t),
        ("block", c.c_int32),
        ("step", c.c_int32),
        ("start", c.c_int32),
        ("block_size", c.c_int32),
        ("n_fixed", c.c_int32),
        ("positions", c.POINTER(c.c_int32)),
        ("tokens", c.POINTER(c.c_int32)),
        ("confidences", c.POINTER(c.c_float)),
    ]


StepCallback = c.CFUNCTYPE(c.c_bool, c.POINTER(Step), c.c_void_p)
TextCallback = c.CFUNCTYPE(c.c_bool, c.POINTER(c.c_char), c.c_size_t, c.c_void_p)


class GenerateParams(c.Structure):
    """struct clover_generate_params."""

    _fields_ = [
        ("size", c.c_size_t),
        ("mode", c.c_int32),
        ("max_tokens", c.c_int32),
        ("window", c.c_int32),
        ("threshold", c.c_float),
        ("temperature", c.c_float),
        ("top_k", c.c_int32),
        ("top_p", c.c_float),
        ("min_p", c.c_float),
        ("seed", c.c_uint64),
        ("special", c.c_bool),
        ("stop", c.POINTER(c.c_char_p)),
        ("n_stop", c.c_size_t),
        ("on_step", StepCallback),
        ("on_text", TextCallback),
        ("user_data", c.c_void_p),
    ]


class Stats(c.Structure):
    """struct clover_stats."""

    _fields_ = [
        ("size", c.c_size_t),
        ("finish", c.c_int32),
        ("prompt_tokens", c.c_int32),
        ("tokens", c.c_int32),
        ("prompt_passes", c.c_int32),
        ("block_passes", c.c_int32),
        ("commit_passes", c.c_int32),
        ("causal_passes", c.c_int32),
        ("prompt_seconds", c.c_double),
        ("block_seconds", c.c_double),
        ("commit_seconds", c.c_double),
        ("causal_seconds", c.c_double),
        ("seconds", c.c_double),
        ("tokens_per_step", c.c_double),
    ]


_P, _I32 = c.c_void_p, c.c_int32

FUNCTIONS = {  # name: (result, arguments), as in clover.h
    "clover_last_error": (c.c_char_p, []),
    "clover_version": (c.c_char_p, []),
    "clover_api_number": (_I32, []),
    "clover_model_default_params": (None, [c.POINTER(ModelParams), c.c_size_t]),
    "clover_model_load": (c.c_int, [c.c_char_p, c.POINTER(ModelParams), c.POINTER(_P)]),
    "clover_model_free": (None, [_P]),
    "clover_model_get_info": (None, [_P, c.POINTER(ModelInfo), c.c_size_t]),
    "clover_model_metadata": (c.c_char_p, [_P, c.c_char_p]),
    "clover_tokenize": (_I32, [_P, c.c_char_p, c.c_size_t, c.c_bool, c.POINTER(_I32), _I32]),
    "clover_detokenize": (_I32, [_P, c.POINTER(_I32), _I32, c.c_bool, c.c_char_p, _I32]),
    "clover_token_is_end": (c.c_bool, [_P, _I32]),
    "clover_session_default_params": (None, [c.POINTER(SessionParams), c.c_size_t]),
    "clover_session_new": (c.c_int, [_P, c.POINTER(SessionParams), c.POINTER(_P)]),
    "clover_session_free": (None, [_P]),
    "clover_session_feed": (c.c_int, [_P, c.POINTER(_I32), _I32]),
    "clover_session_clear": (c.c_int, [_P]),
    "clover_session_tokens": (_I32, [_P, c.POINTER(_I32), _I32]),
    "clover_session_n_ctx": (_I32, [_P]),
    "clover_session_evaluate": (c.c_int, [_P, c.POINTER(_I32), _I32, _I32, c.POINTER(c.c_float)]),
    "clover_imatrix_new": (c.c_int, [c.POINTER(_P)]),
    "clover_imatrix_free": (None, [_P]),
    "clover_imatrix_pause": (None, [_P, c.c_bool]),
    "clover_imatrix_count": (_I32, [_P]),
    "clover_imatrix_get": (c.c_int, [_P, _I32, c.POINTER(ImatrixEntry), c.c_size_t]),
    "clover_generate_default_params": (None, [c.POINTER(GenerateParams), c.c_size_t]),
    "clover_session_check": (c.c_int, [_P, c.POINTER(GenerateParams)]),
    "clover_session_generate": (c.c_int, [_P, c.POINTER(GenerateParams)]),
    "clover_session_begin": (c.c_int, [_P, c.POINTER(GenerateParams)]),
    "clover_session_step": (c.c_int, [_P, c.POINTER(c.c_bool)]),
    "clover_session_cancel": (None, [_P]),
    "clover_session_get_stats": (None, [_P, c.POINTER(Stats), c.c_size_t]),
}


def library_path():
    """The file of libclover: in CLOVER_LIB_PATH (a folder) if that is set, else in the package, else in the repository's build."""
    name = NAMES.get(sys.platform, "libclover.so")
    given = os.environ.get("CLOVER_LIB_PATH")
    folders = [pathlib.Path(given)] if given else [PACKAGED, BUILT]
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    looked = " or ".join(str(folder) for folder in folders)
    raise errors.ResourceError(f"{name} is not in {looked}: build it, or set CLOVER_LIB_PATH to its folder")


@functools.cache
def library():
    """libclover as a `ctypes.CDLL` with argument types set. Raises ResourceError if it is missing or does not fit."""
    path = library_path()
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault(*SPIN)
    folder = os.add_dll_directory(str(path.parent)) if hasattr(os, "add_dll_directory") else contextlib.nullcontext()
    try:
        with folder:
            lib = c.CDLL(str(path))
        _check_number(path, lib)
        for name, (result, arguments) in FUNCTIONS.items():
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise errors.ResourceError(f"{path} cannot be used: {error}") from error
    return lib


def _check_number(path, lib):
    try:
        number = lib.clover_api_number()
    except AttributeError:
        number = 0
    if number != API_NUMBER:
        raise errors.ResourceError(
            f"{path} was built from another version of clover.cpp (interface {number}, needed: {API_NUMBER}): build it anew"
        )


def last_error():
    """Message of this thread's last failure."""
    return library().clover_last_error().decode("utf-8", "replace")


def check(status):
    """Raise the exception of a clover_status that is not CLOVER_OK."""
    if status:
        raise ERRORS[status](last_error())


def defaults(struct, name):
    """A params struct filled by its clover_*_default_params function."""
    params = struct()
    getattr(library(), name)(params, c.sizeof(params))
    return params


def filled(struct, function, handle):
    """A struct filled by a clover_*_get_* function."""
    out = struct()
    function(handle, out, c.sizeof(out))
    return out
