! The C ABI of Sluice. Written by capi/bindings/generate.py: do not edit.
!
! Contracts and lifetimes are those of the headers in capi/include/sluice. Arrays are column-major here, so a row-major
! [T, M] of the ABI is an array (M, T). Unsigned numbers of C are signed ones of the same size.
!
! Arguments: a handle and void* is a type(c_ptr) by value. What else C takes a pointer to is passed by reference: leave
! an optional one away for NULL, pass an array by its first element, end a text with c_null_char.
! A type with an _init has its defaults from that; the others begin as zeros and with their size.
module sluice
  use, intrinsic :: iso_c_binding
  implicit none
  integer(c_int32_t), parameter :: SLUICE_VERSION_MAJOR = 0
  integer(c_int32_t), parameter :: SLUICE_VERSION_MINOR = 1
  integer(c_int32_t), parameter :: SLUICE_VERSION_PATCH = 0
  integer(c_int32_t), parameter :: SLUICE_OK = 0
  integer(c_int32_t), parameter :: SLUICE_E_INVALID_ARGUMENT = -1
  integer(c_int32_t), parameter :: SLUICE_E_ABI = -2
  integer(c_int32_t), parameter :: SLUICE_E_NO_MEMORY = -3
  integer(c_int32_t), parameter :: SLUICE_E_BUSY = -4
  integer(c_int32_t), parameter :: SLUICE_E_UNSUPPORTED = -5
  integer(c_int32_t), parameter :: SLUICE_E_NOT_FOUND = -6
  integer(c_int32_t), parameter :: SLUICE_E_STATE = -7
  integer(c_int32_t), parameter :: SLUICE_E_MISMATCH = -8
  integer(c_int32_t), parameter :: SLUICE_E_PEER_REFUSED = -9
  integer(c_int32_t), parameter :: SLUICE_E_PEER_LOST = -10
  integer(c_int32_t), parameter :: SLUICE_E_TIMED_OUT = -11
  integer(c_int32_t), parameter :: SLUICE_E_ABORTED = -12
  integer(c_int32_t), parameter :: SLUICE_E_EXTERNAL = -13
  integer(c_int32_t), parameter :: SLUICE_E_OVER_BUDGET = -14
  integer(c_int32_t), parameter :: SLUICE_E_INTERNAL = -15
  integer(c_int32_t), parameter :: SLUICE_E_CAPACITY = -16
  integer(c_int32_t), parameter :: SLUICE_LOG_ERROR = 0
  integer(c_int32_t), parameter :: SLUICE_LOG_WARN = 1
  integer(c_int32_t), parameter :: SLUICE_LOG_INFO = 2
  integer(c_int32_t), parameter :: SLUICE_LOG_DEBUG = 3
  integer(c_int32_t), parameter :: SLUICE_TYPE_INT = 0
  integer(c_int32_t), parameter :: SLUICE_TYPE_UINT = 1
  integer(c_int32_t), parameter :: SLUICE_TYPE_FLOAT = 2
  integer(c_int32_t), parameter :: SLUICE_TYPE_BFLOAT = 4
  integer(c_int32_t), parameter :: SLUICE_DEVICE_CPU = 1
  integer(c_int32_t), parameter :: SLUICE_DEVICE_CUDA = 2
  integer(c_int32_t), parameter :: SLUICE_DTYPE_F32 = 1
  integer(c_int32_t), parameter :: SLUICE_DTYPE_BF16 = 2
  integer(c_int32_t), parameter :: SLUICE_DTYPE_F16 = 3
  integer(c_int32_t), parameter :: SLUICE_DTYPE_F64 = 4
  integer(c_int32_t), parameter :: SLUICE_DTYPE_I32 = 5
  integer(c_int32_t), parameter :: SLUICE_DTYPE_I64 = 6
  integer(c_int32_t), parameter :: SLUICE_NCCL_ID_BYTES = 128
  integer(c_int32_t), parameter :: SLUICE_WIRE_LAYER_DTYPE = 0
  integer(c_int32_t), parameter :: SLUICE_WIRE_BF16 = 1
  integer(c_int32_t), parameter :: SLUICE_WIRE_INT8 = 2
  integer(c_int32_t), parameter :: SLUICE_LANE_COMPUTE = 0
  integer(c_int32_t), parameter :: SLUICE_LANE_COMM = 1
  integer(c_int32_t), parameter :: SLUICE_LANE_COPY_OUT = 2
  integer(c_int32_t), parameter :: SLUICE_LANE_COPY_IN = 3
  integer(c_int32_t), parameter :: SLUICE_FORWARD = 0
  integer(c_int32_t), parameter :: SLUICE_BACKWARD = 1
  integer(c_int32_t), parameter :: SLUICE_SCORE_SOFTMAX = 0
  integer(c_int32_t), parameter :: SLUICE_SCORE_SIGMOID = 1
  integer(c_int32_t), parameter :: SLUICE_DROP_NONE = 0
  integer(c_int32_t), parameter :: SLUICE_DROP_POSITION = 1
  integer(c_int32_t), parameter :: SLUICE_DROP_SCORE = 2
  integer(c_int32_t), parameter :: SLUICE_MIGRATION_NONE = 0
  integer(c_int32_t), parameter :: SLUICE_MIGRATION_STREAMS = 1
  integer(c_int32_t), parameter :: SLUICE_MIGRATION_FLUSHES = 2
  integer(c_int32_t), parameter :: SLUICE_MIGRATION_READY = 3
  integer(c_int32_t), parameter :: SLUICE_MIGRATION_AGREED = 4
  integer(c_int32_t), parameter :: SLUICE_MIGRATION_UNDECIDED = 5
  integer(c_int32_t), parameter :: SLUICE_MIGRATION_COMMITTED = 6
  integer(c_int32_t), parameter :: SLUICE_MIGRATION_ABORTED = 7
  integer(c_int32_t), parameter :: SLUICE_MIGRATION_LEAVES = 0
  integer(c_int32_t), parameter :: SLUICE_MIGRATION_ARRIVES = 1
  integer(c_int32_t), parameter :: SLUICE_MIGRATION_STILL = 0
  integer(c_int32_t), parameter :: SLUICE_MIGRATION_AT_COMMIT = 1
  integer(c_int32_t), parameter :: SLUICE_ACTIVATION_IDENTITY = 0
  integer(c_int32_t), parameter :: SLUICE_ACTIVATION_RELU = 1
  integer(c_int32_t), parameter :: SLUICE_ACTIVATION_GELU = 2
  integer(c_int32_t), parameter :: SLUICE_ACTIVATION_GELU_TANH = 3
  integer(c_int32_t), parameter :: SLUICE_ACTIVATION_SILU = 4
  integer(c_int32_t), parameter :: SLUICE_ACTIVATION_RELU2 = 5
  integer(c_int32_t), parameter :: SLUICE_ACTIVATION_SWIGLU = 6
  integer(c_int32_t), parameter :: SLUICE_GATED_NO = 0
  integer(c_int32_t), parameter :: SLUICE_GATED_HALVES = 1
  integer(c_int32_t), parameter :: SLUICE_GATED_INTERLEAVED = 2
  integer(c_int32_t), parameter :: SLUICE_WGRAD_ADAPTIVE = -1
  integer(c_int32_t), parameter :: SLUICE_WGRAD_DEFERRED = 0
  integer(c_int32_t), parameter :: SLUICE_WGRAD_PER_CHUNK = 1
  integer(c_int32_t), parameter :: SLUICE_RESTORE_ADAPTIVE = -1
  integer(c_int32_t), parameter :: SLUICE_RESTORE_KEEP = 0
  integer(c_int32_t), parameter :: SLUICE_RESTORE_OFFLOAD = 1
  integer(c_int32_t), parameter :: SLUICE_RESTORE_REDISPATCH = 2
  integer(c_int32_t), parameter :: SLUICE_RESTORE_RECOMPUTE = 3
  integer(c_int32_t), parameter :: SLUICE_RESTORE_BY_CHUNK = 255
  integer(c_int32_t), parameter :: SLUICE_CHUNKING_ADAPTIVE = 0
  integer(c_int32_t), parameter :: SLUICE_CHUNKING_TOKENS = 1
  integer(c_int32_t), parameter :: SLUICE_GROUPING_ADAPTIVE = 0
  integer(c_int32_t), parameter :: SLUICE_GROUPING_OFF = 1
  integer(c_int32_t), parameter :: SLUICE_GROUPING_ON = 2
  integer(c_int32_t), parameter :: SLUICE_EXCHANGE_EXACT = 0
  integer(c_int32_t), parameter :: SLUICE_EXCHANGE_CAPACITY = 1
  integer(c_int32_t), parameter :: SLUICE_DEDUPLICATE_NONE = 0
  integer(c_int32_t), parameter :: SLUICE_DEDUPLICATE_RANKS = 1
  integer(c_int32_t), parameter :: SLUICE_DEDUPLICATE_NODES = 2
  integer(c_int32_t), parameter :: SLUICE_DEDUPLICATE_ADAPTIVE = 3
  integer(c_int32_t), parameter :: SLUICE_SAVED_META = 0
  integer(c_int32_t), parameter :: SLUICE_SAVED_INPUT = 1
  integer(c_int32_t), parameter :: SLUICE_SAVED_PRE_ACTIVATION = 2
  integer(c_int32_t), parameter :: SLUICE_SAVED_HOST_INPUT = 3
  integer(c_int32_t), parameter :: SLUICE_SAVED_HOST_PRE_ACTIVATION = 4
  integer(c_int32_t), parameter :: SLUICE_SAVED_COUNT = 5
  integer(c_int32_t), parameter :: SLUICE_GRAD_OVERWRITE = 0
  integer(c_int32_t), parameter :: SLUICE_GRAD_ACCUMULATE = 1
  integer(c_int32_t), parameter :: SLUICE_BACKWARD_DGRAD = 1
  integer(c_int32_t), parameter :: SLUICE_BACKWARD_WGRAD = 2
  integer(c_int32_t), parameter :: SLUICE_BACKWARD_BOTH = 3
  integer(c_int32_t), parameter :: SLUICE_STAGE_OUTPUT = 0
  integer(c_int32_t), parameter :: SLUICE_STAGE_INPUT_GRAD = 1
  integer(c_int32_t), parameter :: SLUICE_PIPELINE_LOOPED = 0
  integer(c_int32_t), parameter :: SLUICE_PIPELINE_V = 1
  integer(c_int32_t), parameter :: SLUICE_PIPELINE_MAX_NOTE = 1024
  integer(c_int32_t), parameter :: SLUICE_PIPELINE_MEASURED = 0
  integer(c_int32_t), parameter :: SLUICE_PIPELINE_PREDICTED = 1
  integer(c_int32_t), parameter :: SLUICE_LAYER_MOVE_UPPER = 0
  integer(c_int32_t), parameter :: SLUICE_LAYER_MOVE_LOWER = 1
  integer(c_int32_t), parameter :: SLUICE_LAYER_MOVE_RAN = 1
  integer(c_int32_t), parameter :: SLUICE_LAYER_MOVE_HAS = 2
  integer(c_int32_t), parameter :: SLUICE_MOVE_PAYS = 0
  integer(c_int32_t), parameter :: SLUICE_MOVE_NO_GAIN = 1
  integer(c_int32_t), parameter :: SLUICE_MOVE_SMALL = 2
  integer(c_int32_t), parameter :: SLUICE_MOVE_TOO_SOON = 3
  integer(c_int32_t), parameter :: SLUICE_MOVE_COSTS_MORE = 4
  integer(c_int32_t), parameter :: SLUICE_PLANNER_CHOSEN = 0
  integer(c_int32_t), parameter :: SLUICE_PLANNER_SLOWER = 1
  integer(c_int32_t), parameter :: SLUICE_PLANNER_OVER_BUDGET = 2
  integer(c_int32_t), parameter :: SLUICE_PLANNER_EQUAL = 3
  integer(c_int32_t), parameter :: SLUICE_PLANNER_OVER_HOST_BUDGET = 4
  integer(c_int32_t), parameter :: SLUICE_WGRAD_CALL_NONE = 0
  integer(c_int32_t), parameter :: SLUICE_WGRAD_CALL_NOW = 1
  integer(c_int32_t), parameter :: SLUICE_WGRAD_CALL_LATER = 2
  integer(c_int32_t), parameter :: SLUICE_SCHEDULE_LANES = 4
  integer(c_int32_t), parameter :: SLUICE_STAGES_KEEP = 0
  integer(c_int32_t), parameter :: SLUICE_STAGES_RECOMPUTE = 1
  integer(c_int32_t), parameter :: SLUICE_STAGES_OFFLOAD = 2
  integer(c_int32_t), parameter :: SLUICE_STAGES_MIXED = 3
  integer(c_int32_t), parameter :: SLUICE_STAGES_1F1B = 0
  integer(c_int32_t), parameter :: SLUICE_STAGES_GPIPE = 1
  integer(c_int32_t), parameter :: SLUICE_STAGES_MESSAGE_DRIVEN = 2
  integer(c_int32_t), parameter :: SLUICE_STAGES_AUTO = 0
  integer(c_int32_t), parameter :: SLUICE_STAGES_EXACT = 1
  integer(c_int32_t), parameter :: SLUICE_STAGES_HEURISTIC = 2
  integer(c_int32_t), parameter :: SLUICE_STAGES_UNCOARSENED = 3
  integer(c_int32_t), parameter :: SLUICE_STAGES_FASTEST = 0
  integer(c_int32_t), parameter :: SLUICE_STAGES_FREE = 1
  integer(c_int32_t), parameter :: SLUICE_STAGES_SAVES = 2
  integer(c_int32_t), parameter :: SLUICE_STAGES_UNBURDENS = 3
  integer(c_int32_t), parameter :: SLUICE_STAGES_NO_TIME = 4
  integer(c_int32_t), parameter :: SLUICE_STAGES_OVER_BUDGET = 5
  integer(c_int32_t), parameter :: SLUICE_TUNER_ADAPTIVE = 0
  integer(c_int32_t), parameter :: SLUICE_TUNER_PROFILE = 1
  integer(c_int32_t), parameter :: SLUICE_TUNER_MODEL = 2
  integer(c_int32_t), parameter :: SLUICE_WHY_NOTHING_YET = 0
  integer(c_int32_t), parameter :: SLUICE_WHY_ON_TRIAL = 1
  integer(c_int32_t), parameter :: SLUICE_WHY_INSIDE_RANGE = 2
  integer(c_int32_t), parameter :: SLUICE_WHY_ONE_LEFT = 3
  integer(c_int32_t), parameter :: SLUICE_WHY_RACED = 4
  integer(c_int32_t), parameter :: SLUICE_WHY_PREDICTED = 5
  integer(c_int32_t), parameter :: SLUICE_WHY_QUESTIONED = 6
  integer(c_int32_t), parameter :: SLUICE_WHY_IMPORTED = 7

  type, bind(c) :: sluice_error_info_t
    integer(c_size_t) :: struct_size = 1048
    integer(c_int32_t) :: status = 0
    integer(c_int32_t) :: rank = 0
    integer(c_int32_t) :: peer = 0
    integer(c_int32_t) :: native_code = 0
    character(kind=c_char) :: message(1024) = c_null_char
  end type

  type, bind(c) :: sluice_tensor_t
    type(c_ptr) :: data = c_null_ptr
    integer(c_int32_t) :: device_type = 0
    integer(c_int32_t) :: device_id = 0
    integer(c_int32_t) :: ndim = 0
    integer(c_int8_t) :: type_code = 0
    integer(c_int8_t) :: type_bits = 0
    integer(c_int16_t) :: type_lanes = 0
    type(c_ptr) :: shape = c_null_ptr
    type(c_ptr) :: strides = c_null_ptr
    integer(c_int64_t) :: byte_offset = 0
  end type

  type, bind(c) :: sluice_ext_header_t
    integer(c_int32_t) :: type = 0
    integer(c_int32_t) :: reserved = 0
    type(c_ptr) :: next = c_null_ptr
  end type

  type, bind(c) :: sluice_comm_config_t
    integer(c_size_t) :: struct_size = 40
    type(c_ptr) :: next = c_null_ptr
    integer(c_int32_t) :: rank = 0
    integer(c_int32_t) :: world_size = 0
    integer(c_int64_t) :: timeout_ns = 0
    integer(c_int64_t) :: warn_ns = 0
  end type

  type, bind(c) :: sluice_exchange_t
    type(c_ptr) :: send = c_null_ptr
    type(c_ptr) :: send_bytes = c_null_ptr
    type(c_ptr) :: recv = c_null_ptr
    type(c_ptr) :: recv_bytes = c_null_ptr
  end type

  type, bind(c) :: sluice_host_failure_t
    integer(c_int32_t) :: peer = 0
    integer(c_int32_t) :: native_code = 0
    character(kind=c_char) :: message(512) = c_null_char
  end type

  type, bind(c) :: sluice_host_comm_vtable_t
    integer(c_size_t) :: struct_size = 64
    type(c_funptr) :: exchange_start = c_null_funptr
    type(c_funptr) :: exchange_wait = c_null_funptr
    type(c_funptr) :: abort = c_null_funptr
    type(c_funptr) :: publish = c_null_funptr
    type(c_funptr) :: lookup = c_null_funptr
    type(c_funptr) :: destroy = c_null_funptr
    type(c_funptr) :: is_interrupted = c_null_funptr
  end type

  type, bind(c) :: sluice_nccl_group_t
    integer(c_size_t) :: struct_size = 72
    type(c_ptr) :: next = c_null_ptr
    integer(c_int32_t) :: device_id = 0
    integer(c_int32_t) :: color = 0
    type(c_ptr) :: id = c_null_ptr
    type(c_ptr) :: parent = c_null_ptr
    type(c_ptr) :: library = c_null_ptr
    type(c_ptr) :: store_user = c_null_ptr
    type(c_funptr) :: publish = c_null_funptr
    type(c_funptr) :: lookup = c_null_funptr
  end type

  type, bind(c) :: sluice_tcp_config_t
    integer(c_size_t) :: struct_size = 32
    type(c_ptr) :: next = c_null_ptr
    type(c_ptr) :: interfaces = c_null_ptr
    integer(c_int64_t) :: connect_timeout_ns = 0
  end type

  type, bind(c) :: sluice_host_gemm_args_t
    integer(c_int64_t) :: m = 0
    integer(c_int64_t) :: n = 0
    integer(c_int64_t) :: k = 0
    type(c_ptr) :: a = c_null_ptr
    type(c_ptr) :: b = c_null_ptr
    type(c_ptr) :: c = c_null_ptr
    integer(c_int64_t) :: a_row_stride = 0
    integer(c_int64_t) :: a_col_stride = 0
    integer(c_int64_t) :: b_row_stride = 0
    integer(c_int64_t) :: b_col_stride = 0
    integer(c_int64_t) :: c_row_stride = 0
    integer(c_int64_t) :: c_col_stride = 0
    integer(c_int32_t) :: dtype_ab = 0
    integer(c_int32_t) :: dtype_c = 0
    real(c_float) :: beta = 0
    integer(c_int32_t) :: reserved = 0
  end type

  type, bind(c) :: sluice_context_config_t
    integer(c_size_t) :: struct_size = 136
    type(c_ptr) :: next = c_null_ptr
    integer(c_int32_t) :: device_type = 0
    integer(c_int32_t) :: device_id = 0
    type(c_ptr) :: gemm = c_null_ptr
    type(c_ptr) :: gemm_library = c_null_ptr
    type(c_funptr) :: host_gemm = c_null_funptr
    type(c_ptr) :: host_gemm_user = c_null_ptr
    type(c_funptr) :: allocate = c_null_funptr
    type(c_funptr) :: release = c_null_funptr
    type(c_ptr) :: allocate_user = c_null_ptr
    integer(c_int64_t) :: memory_budget = 0
    integer(c_int32_t) :: max_outstanding = 0
    integer(c_int32_t) :: separate_wgrad = 0
    integer(c_int64_t) :: host_memory_budget = 0
    integer(c_int64_t) :: shared_memory_budget = 0
    integer(c_int64_t) :: shared_host_memory_budget = 0
    integer(c_int32_t) :: num_layers = 0
    integer(c_int32_t) :: reserved = 0
    integer(c_int32_t) :: ranks_per_node = 0
    integer(c_int32_t) :: wire_dtype = 0
  end type

  type, bind(c) :: sluice_context_stats_t
    integer(c_size_t) :: struct_size = 272
    integer(c_int64_t) :: current_bytes = 0
    integer(c_int64_t) :: peak_bytes = 0
    integer(c_int64_t) :: slot_bytes = 0
    integer(c_int64_t) :: saved_bytes = 0
    integer(c_int64_t) :: bytes_sent = 0
    integer(c_int64_t) :: num_passes = 0
    integer(c_int64_t) :: compute_ns = 0
    integer(c_int64_t) :: comm_ns = 0
    integer(c_int64_t) :: comm_cpu_ns = 0
    integer(c_int64_t) :: pass_ns = 0
    integer(c_int32_t) :: last_num_chunks = 0
    integer(c_int32_t) :: last_is_settled = 0
    character(kind=c_char) :: gemm(64) = c_null_char
    integer(c_int64_t) :: num_walks = 0
    integer(c_int64_t) :: bind_cpu_ns = 0
    integer(c_int64_t) :: walk_cpu_ns = 0
    integer(c_int64_t) :: wait_ns = 0
    integer(c_int64_t) :: num_wakes = 0
    integer(c_int64_t) :: wake_cpu_ns = 0
    integer(c_int64_t) :: num_readings = 0
    integer(c_int64_t) :: readings_cpu_ns = 0
    integer(c_int64_t) :: num_pool_allocations = 0
    integer(c_int64_t) :: idle_pool_bytes = 0
    integer(c_int64_t) :: num_fallback_chunks = 0
    integer(c_int64_t) :: num_outstanding = 0
    integer(c_int64_t) :: most_outstanding = 0
    integer(c_int64_t) :: planned_outstanding = 0
  end type

  type, bind(c) :: sluice_trace_event_t
    integer(c_int64_t) :: begin_ns = 0
    integer(c_int64_t) :: end_ns = 0
    type(c_ptr) :: op = c_null_ptr
    integer(c_int32_t) :: layer = 0
    integer(c_int32_t) :: chunk = 0
    integer(c_int32_t) :: lane = 0
    integer(c_int32_t) :: direction = 0
    integer(c_int64_t) :: bytes = 0
  end type

  type, bind(c) :: sluice_gate_config_t
    integer(c_size_t) :: struct_size = 72
    type(c_ptr) :: next = c_null_ptr
    integer(c_int32_t) :: num_experts = 0
    integer(c_int32_t) :: top_k = 0
    integer(c_int32_t) :: score = 0
    integer(c_int32_t) :: renormalize = 0
    integer(c_int32_t) :: num_groups = 0
    integer(c_int32_t) :: top_groups = 0
    integer(c_int32_t) :: group_score_top = 0
    integer(c_int32_t) :: drop_policy = 0
    integer(c_int64_t) :: capacity = 0
    real(c_float) :: capacity_factor = 0
    real(c_float) :: scaling = 0
    integer(c_int64_t) :: min_capacity = 0
  end type

  type, bind(c) :: sluice_migration_config_t
    integer(c_size_t) :: struct_size = 56
    type(c_ptr) :: next = c_null_ptr
    integer(c_int64_t) :: epoch = 0
    integer(c_int64_t) :: bytes_per_second = 0
    integer(c_int64_t) :: staging_bytes = 0
    integer(c_int64_t) :: chunk_bytes = 0
    integer(c_int32_t) :: gives_way = 0
    integer(c_int32_t) :: reserved = 0
  end type

  type, bind(c) :: sluice_migration_span_t
    type(c_ptr) :: data = c_null_ptr
    integer(c_int64_t) :: bytes = 0
    integer(c_int32_t) :: when = 0
    integer(c_int32_t) :: reserved = 0
  end type

  type, bind(c) :: sluice_migration_item_t
    integer(c_int64_t) :: id = 0
    integer(c_int32_t) :: peer = 0
    integer(c_int32_t) :: direction = 0
    type(c_ptr) :: spans = c_null_ptr
    integer(c_int32_t) :: num_spans = 0
    integer(c_int32_t) :: reserved = 0
  end type

  type, bind(c) :: sluice_migration_progress_t
    integer(c_size_t) :: struct_size = 80
    integer(c_int64_t) :: epoch = 0
    integer(c_int64_t) :: target = 0
    integer(c_int64_t) :: leaving_bytes = 0
    integer(c_int64_t) :: arriving_bytes = 0
    integer(c_int64_t) :: hidden_bytes = 0
    integer(c_int64_t) :: staged_bytes = 0
    integer(c_int64_t) :: peak_staged_bytes = 0
    real(c_double) :: commit_seconds = 0
    integer(c_int32_t) :: phase = 0
    integer(c_int32_t) :: reserved = 0
  end type

  type, bind(c) :: sluice_moe_config_t
    integer(c_size_t) :: struct_size = 152
    type(c_ptr) :: next = c_null_ptr
    integer(c_int64_t) :: model_width = 0
    integer(c_int64_t) :: hidden_width = 0
    integer(c_int32_t) :: num_experts = 0
    integer(c_int32_t) :: top_k = 0
    integer(c_int32_t) :: dtype = 0
    integer(c_int32_t) :: activation = 0
    integer(c_int32_t) :: gated = 0
    integer(c_int32_t) :: bias = 0
    integer(c_int32_t) :: num_chunks = 0
    integer(c_int32_t) :: wgrad_mode = 0
    integer(c_int32_t) :: callback_experts = 0
    integer(c_int32_t) :: layer_id = 0
    type(c_ptr) :: expert_rank = c_null_ptr
    integer(c_int32_t) :: restore_input = 0
    integer(c_int32_t) :: restore_pre_activation = 0
    real(c_float) :: swiglu_alpha = 0
    real(c_float) :: swiglu_limit = 0
    real(c_float) :: swiglu_offset = 0
    integer(c_int32_t) :: grouping = 0
    integer(c_int32_t) :: exchange_mode = 0
    integer(c_int32_t) :: chunking = 0
    integer(c_int64_t) :: capacity_rows = 0
    integer(c_int32_t) :: deduplicate = 0
    integer(c_int32_t) :: reuse = 0
    type(c_ptr) :: restore_input_of = c_null_ptr
    type(c_ptr) :: restore_pre_activation_of = c_null_ptr
    type(c_ptr) :: expert_slot = c_null_ptr
  end type

  type, bind(c) :: sluice_expert_placement_t
    integer(c_size_t) :: struct_size = 40
    type(c_ptr) :: next = c_null_ptr
    type(c_ptr) :: expert_rank = c_null_ptr
    type(c_ptr) :: expert_slot = c_null_ptr
    integer(c_int64_t) :: epoch = 0
  end type

  type, bind(c) :: sluice_expert_tensors_t
    integer(c_size_t) :: struct_size = 56
    type(c_ptr) :: w1 = c_null_ptr
    type(c_ptr) :: w3 = c_null_ptr
    type(c_ptr) :: w2 = c_null_ptr
    type(c_ptr) :: b1 = c_null_ptr
    type(c_ptr) :: b3 = c_null_ptr
    type(c_ptr) :: b2 = c_null_ptr
  end type

  type, bind(c) :: sluice_expert_callbacks_t
    integer(c_size_t) :: struct_size = 32
    type(c_ptr) :: user = c_null_ptr
    type(c_funptr) :: forward = c_null_funptr
    type(c_funptr) :: backward = c_null_funptr
  end type

  type, bind(c) :: sluice_moe_forward_args_t
    integer(c_size_t) :: struct_size = 104
    type(c_ptr) :: next = c_null_ptr
    type(c_ptr) :: tokens = c_null_ptr
    type(c_ptr) :: expert_ids = c_null_ptr
    type(c_ptr) :: route_weights = c_null_ptr
    type(c_ptr) :: params = c_null_ptr
    type(c_ptr) :: callbacks = c_null_ptr
    type(c_ptr) :: out_tokens = c_null_ptr
    type(c_funptr) :: save = c_null_funptr
    type(c_ptr) :: save_user = c_null_ptr
    integer(c_int32_t) :: needs_backward = 0
    integer(c_int32_t) :: local_status = 0
    type(c_ptr) :: local_message = c_null_ptr
    integer(c_int32_t) :: save_is_counted = 0
    integer(c_int32_t) :: repeats = 0
  end type

  type, bind(c) :: sluice_moe_backward_args_t
    integer(c_size_t) :: struct_size = 120
    type(c_ptr) :: next = c_null_ptr
    type(c_ptr) :: tokens = c_null_ptr
    type(c_ptr) :: route_weights = c_null_ptr
    type(c_ptr) :: params = c_null_ptr
    type(c_ptr) :: callbacks = c_null_ptr
    type(c_ptr) :: grad_out = c_null_ptr
    type(c_ptr) :: grad_tokens = c_null_ptr
    type(c_ptr) :: grad_route_weights = c_null_ptr
    type(c_ptr) :: grad_params = c_null_ptr
    integer(c_int32_t) :: grad_mode = 0
    integer(c_int32_t) :: parts = 0
    type(c_funptr) :: expert_ready = c_null_funptr
    type(c_ptr) :: expert_ready_user = c_null_ptr
    integer(c_int32_t) :: local_status = 0
    integer(c_int32_t) :: may_reuse_saved = 0
    type(c_ptr) :: local_message = c_null_ptr
  end type

  type, bind(c) :: sluice_capacity_report_t
    integer(c_size_t) :: struct_size = 56
    integer(c_int64_t) :: num_forwards = 0
    integer(c_int64_t) :: num_routes = 0
    integer(c_int64_t) :: num_dropped = 0
    integer(c_int64_t) :: most_rows = 0
    integer(c_int64_t) :: bad_route = 0
    integer(c_int32_t) :: most_expert = 0
    integer(c_int32_t) :: reserved = 0
  end type

  type, bind(c) :: sluice_optimizer_config_t
    integer(c_size_t) :: struct_size = 40
    type(c_ptr) :: next = c_null_ptr
    type(c_ptr) :: context = c_null_ptr
    integer(c_int64_t) :: device_bucket = 0
    integer(c_int32_t) :: device_num_slots = 0
    integer(c_int32_t) :: reserved = 0
  end type

  type, bind(c) :: sluice_optimizer_tensor_t
    integer(c_int64_t) :: count = 0
    integer(c_int64_t) :: step = 0
    type(c_ptr) :: param = c_null_ptr
    type(c_ptr) :: master = c_null_ptr
    type(c_ptr) :: grad = c_null_ptr
    type(c_ptr) :: exp_avg = c_null_ptr
    type(c_ptr) :: exp_avg_sq = c_null_ptr
    integer(c_int32_t) :: param_dtype = 0
    integer(c_int32_t) :: grad_dtype = 0
  end type

  type, bind(c) :: sluice_optimizer_group_t
    integer(c_size_t) :: struct_size = 88
    type(c_ptr) :: tensors = c_null_ptr
    integer(c_int64_t) :: num_tensors = 0
    real(c_double) :: lr = 0
    real(c_double) :: beta1 = 0
    real(c_double) :: beta2 = 0
    real(c_double) :: epsilon = 0
    real(c_double) :: weight_decay = 0
    integer(c_int32_t) :: decoupled = 0
    integer(c_int32_t) :: bias_correction = 0
    integer(c_int32_t) :: maximize = 0
    integer(c_int32_t) :: reserved = 0
    type(c_ptr) :: comm = c_null_ptr
  end type

  type, bind(c) :: sluice_optimizer_step_args_t
    integer(c_size_t) :: struct_size = 88
    type(c_ptr) :: groups = c_null_ptr
    integer(c_int64_t) :: num_groups = 0
    real(c_double) :: loss_scale = 0
    real(c_double) :: max_norm = 0
    integer(c_int32_t) :: check_finite = 0
    integer(c_int32_t) :: reserved = 0
    type(c_ptr) :: comm = c_null_ptr
    integer(c_int64_t) :: bucket = 0
    integer(c_int64_t) :: sum_buckets = 0
    type(c_ptr) :: file = c_null_ptr
    type(c_ptr) :: stream = c_null_ptr
  end type

  type, bind(c) :: sluice_optimizer_step_result_t
    integer(c_size_t) :: struct_size = 80
    real(c_double) :: norm = 0
    integer(c_int32_t) :: skipped = 0
    integer(c_int32_t) :: decided = 0
    integer(c_int64_t) :: sum_buckets = 0
    integer(c_int64_t) :: staging_bytes = 0
    integer(c_int64_t) :: sum_ns = 0
    integer(c_int64_t) :: update_ns = 0
    integer(c_int64_t) :: step_ns = 0
    integer(c_int64_t) :: read_ns = 0
    integer(c_int64_t) :: write_ns = 0
  end type

  type, bind(c) :: sluice_optimizer_file_config_t
    integer(c_size_t) :: struct_size = 96
    type(c_ptr) :: next = c_null_ptr
    type(c_ptr) :: path = c_null_ptr
    integer(c_int64_t) :: step = 0
    integer(c_int32_t) :: durable = 0
    integer(c_int32_t) :: reserved = 0
    type(c_ptr) :: comm = c_null_ptr
    integer(c_int32_t) :: rank = 0
    integer(c_int32_t) :: world_size = 0
    type(c_ptr) :: groups = c_null_ptr
    integer(c_int64_t) :: num_groups = 0
    type(c_ptr) :: num_dims = c_null_ptr
    type(c_ptr) :: dims = c_null_ptr
    integer(c_int32_t) :: replaces = 0
    integer(c_int32_t) :: reserved2 = 0
  end type

  type, bind(c) :: sluice_optimizer_file_info_t
    integer(c_size_t) :: struct_size = 48
    integer(c_int64_t) :: count = 0
    integer(c_int64_t) :: step = 0
    integer(c_int64_t) :: other_step = 0
    integer(c_int64_t) :: unfinished_step = 0
    integer(c_int64_t) :: bytes = 0
  end type

  type, bind(c) :: sluice_optimizer_workload_t
    integer(c_size_t) :: struct_size = 104
    type(c_ptr) :: next = c_null_ptr
    integer(c_int64_t) :: count = 0
    integer(c_int64_t) :: bucket = 0
    integer(c_int64_t) :: sum_buckets = 0
    integer(c_int32_t) :: param_dtype = 0
    integer(c_int32_t) :: grad_dtype = 0
    integer(c_int32_t) :: num_slots = 0
    integer(c_int32_t) :: world_size = 0
    integer(c_int32_t) :: decides = 0
    integer(c_int32_t) :: sums_on_device = 0
    real(c_double) :: update_rate = 0
    real(c_double) :: copy_in_rate = 0
    real(c_double) :: copy_out_rate = 0
    real(c_double) :: sum_rate = 0
    real(c_double) :: sum_seconds = 0
  end type

  type, bind(c) :: sluice_optimizer_prediction_t
    integer(c_size_t) :: struct_size = 152
    integer(c_int64_t) :: param_bytes = 0
    integer(c_int64_t) :: grad_bytes = 0
    integer(c_int64_t) :: slot_bytes = 0
    integer(c_int64_t) :: staging_bytes = 0
    integer(c_int64_t) :: near_bytes = 0
    integer(c_int64_t) :: state_bytes = 0
    integer(c_int64_t) :: file_bytes = 0
    integer(c_int64_t) :: whole_bytes = 0
    integer(c_int64_t) :: sum_buckets = 0
    real(c_double) :: seconds = 0
    real(c_double) :: seconds_by_k(4) = 0
    real(c_double) :: update_seconds = 0
    real(c_double) :: copy_in_seconds = 0
    real(c_double) :: copy_out_seconds = 0
    real(c_double) :: sum_seconds = 0
  end type

  type, bind(c) :: sluice_stage_tensors_t
    type(c_ptr) :: tensors = c_null_ptr
    integer(c_int32_t) :: num_tensors = 0
    integer(c_int32_t) :: is_local = 0
    integer(c_int64_t) :: word = 0
  end type

  type, bind(c) :: sluice_stage_call_t
    integer(c_size_t) :: struct_size = 56
    integer(c_int32_t) :: virtual_stage = 0
    integer(c_int32_t) :: micro_batch = 0
    integer(c_int32_t) :: is_first = 0
    integer(c_int32_t) :: is_last = 0
    integer(c_int32_t) :: forward_only = 0
    integer(c_int32_t) :: reserved = 0
    type(c_ptr) :: input = c_null_ptr
    type(c_ptr) :: output = c_null_ptr
    type(c_ptr) :: output_grad = c_null_ptr
  end type

  type, bind(c) :: sluice_pipeline_callbacks_t
    integer(c_size_t) :: struct_size = 72
    type(c_funptr) :: load = c_null_funptr
    type(c_funptr) :: forward = c_null_funptr
    type(c_funptr) :: loss = c_null_funptr
    type(c_funptr) :: backward = c_null_funptr
    type(c_funptr) :: weight_grad = c_null_funptr
    type(c_funptr) :: release = c_null_funptr
    type(c_funptr) :: is_interrupted = c_null_funptr
    type(c_funptr) :: reduce = c_null_funptr
  end type

  type, bind(c) :: sluice_pipeline_config_t
    integer(c_size_t) :: struct_size = 112
    type(c_ptr) :: next = c_null_ptr
    type(c_ptr) :: policy = c_null_ptr
    type(c_ptr) :: partition = c_null_ptr
    integer(c_int32_t) :: num_virtual = 0
    integer(c_int32_t) :: placement = 0
    integer(c_int32_t) :: weight_apart = 0
    integer(c_int32_t) :: receives_ahead = 0
    integer(c_int32_t) :: in_flight = 0
    integer(c_int32_t) :: held = 0
    type(c_ptr) :: in_flight_of = c_null_ptr
    integer(c_int64_t) :: memory_budget = 0
    type(c_ptr) :: activation_bytes = c_null_ptr
    type(c_ptr) :: held_bytes = c_null_ptr
    integer(c_int32_t) :: num_replicas = 0
    integer(c_int32_t) :: replica = 0
    integer(c_int32_t) :: stage = 0
    integer(c_int32_t) :: reserved = 0
    type(c_ptr) :: has_experts = c_null_ptr
  end type

  type, bind(c) :: sluice_pipeline_batch_t
    integer(c_size_t) :: struct_size = 16
    integer(c_int32_t) :: num_micro_batches = 0
    integer(c_int32_t) :: forward_only = 0
  end type

  type, bind(c) :: sluice_pipeline_stats_t
    integer(c_size_t) :: struct_size = 128
    integer(c_int64_t) :: num_batches = 0
    integer(c_int64_t) :: num_failed = 0
    integer(c_int64_t) :: batch_ns = 0
    integer(c_int64_t) :: callback_ns = 0
    integer(c_int64_t) :: wait_ns = 0
    integer(c_int64_t) :: agree_ns = 0
    integer(c_int64_t) :: messages_sent = 0
    integer(c_int64_t) :: bytes_sent = 0
    integer(c_int64_t) :: bytes_received = 0
    integer(c_int64_t) :: peak_bytes = 0
    integer(c_int64_t) :: planned_bytes = 0
    integer(c_int64_t) :: most_message_bytes = 0
    integer(c_int32_t) :: in_flight = 0
    integer(c_int32_t) :: most_in_flight = 0
    integer(c_int32_t) :: most_held = 0
    integer(c_int32_t) :: is_chosen = 0
    type(c_ptr) :: policy = c_null_ptr
  end type

  type, bind(c) :: sluice_stage_event_t
    integer(c_int64_t) :: begin_ns = 0
    integer(c_int64_t) :: end_ns = 0
    type(c_ptr) :: op = c_null_ptr
    integer(c_int32_t) :: virtual_stage = 0
    integer(c_int32_t) :: micro_batch = 0
    integer(c_int32_t) :: peer = 0
    integer(c_int32_t) :: reserved = 0
    integer(c_int64_t) :: bytes = 0
  end type

  type, bind(c) :: sluice_layer_move_t
    integer(c_int32_t) :: role = 0
    integer(c_int32_t) :: to_lower = 0
    integer(c_int32_t) :: has = 0
    integer(c_int32_t) :: trigger = 0
    integer(c_int32_t) :: num_open = 0
    integer(c_int32_t) :: is_over = 0
  end type

  type, bind(c) :: sluice_pipeline_workload_t
    integer(c_size_t) :: struct_size = 144
    type(c_ptr) :: next = c_null_ptr
    type(c_ptr) :: policy = c_null_ptr
    integer(c_int32_t) :: num_stages = 0
    integer(c_int32_t) :: num_virtual = 0
    integer(c_int32_t) :: num_micro_batches = 0
    integer(c_int32_t) :: placement = 0
    integer(c_int32_t) :: weight_apart = 0
    integer(c_int32_t) :: receives_ahead = 0
    integer(c_int32_t) :: in_flight = 0
    integer(c_int32_t) :: rendezvous = 0
    type(c_ptr) :: forward_seconds = c_null_ptr
    type(c_ptr) :: backward_seconds = c_null_ptr
    type(c_ptr) :: weight_seconds = c_null_ptr
    type(c_ptr) :: message_seconds = c_null_ptr
    type(c_ptr) :: activation_bytes = c_null_ptr
    type(c_ptr) :: held_bytes = c_null_ptr
    type(c_ptr) :: memory_budget = c_null_ptr
    integer(c_int32_t) :: shares_cards = 0
    integer(c_int32_t) :: reserved = 0
    type(c_funptr) :: op_seconds = c_null_funptr
    type(c_ptr) :: user = c_null_ptr
    type(c_ptr) :: reduce_seconds = c_null_ptr
  end type

  type, bind(c) :: sluice_stage_prediction_t
    real(c_double) :: busy_seconds = 0
    real(c_double) :: bubble = 0
    integer(c_int64_t) :: planned_bytes = 0
    integer(c_int64_t) :: peak_bytes = 0
    integer(c_int32_t) :: in_flight = 0
    integer(c_int32_t) :: most_in_flight = 0
    integer(c_int32_t) :: most_held = 0
    integer(c_int32_t) :: reserved = 0
  end type

  type, bind(c) :: sluice_pipeline_prediction_t
    integer(c_size_t) :: struct_size = 40
    real(c_double) :: seconds = 0
    real(c_double) :: bubble = 0
    integer(c_int32_t) :: in_flight = 0
    integer(c_int32_t) :: is_chosen = 0
    type(c_ptr) :: policy = c_null_ptr
  end type

  type, bind(c) :: sluice_placement_problem_t
    integer(c_size_t) :: struct_size = 64
    type(c_ptr) :: next = c_null_ptr
    type(c_ptr) :: loads = c_null_ptr
    type(c_ptr) :: expert_rank = c_null_ptr
    type(c_ptr) :: expert_slot = c_null_ptr
    type(c_ptr) :: expert_bytes = c_null_ptr
    real(c_double) :: target = 0
    integer(c_int32_t) :: num_experts = 0
    integer(c_int32_t) :: num_ranks = 0
  end type

  type, bind(c) :: sluice_placement_result_t
    integer(c_size_t) :: struct_size = 80
    type(c_ptr) :: next = c_null_ptr
    type(c_ptr) :: expert_rank = c_null_ptr
    type(c_ptr) :: expert_slot = c_null_ptr
    real(c_double) :: mean_load = 0
    integer(c_int64_t) :: load_before = 0
    integer(c_int64_t) :: load = 0
    integer(c_int64_t) :: bound_load = 0
    integer(c_int64_t) :: moved_bytes = 0
    integer(c_int32_t) :: num_moves = 0
    integer(c_int32_t) :: is_optimal = 0
  end type

  type, bind(c) :: sluice_planner_move_t
    integer(c_size_t) :: struct_size = 72
    type(c_ptr) :: next = c_null_ptr
    real(c_double) :: step_seconds = 0
    real(c_double) :: planned_step_seconds = 0
    real(c_double) :: move_seconds = 0
    real(c_double) :: horizon_steps = 0
    real(c_double) :: least_gain = 0
    integer(c_int64_t) :: steps_since_move = 0
    integer(c_int64_t) :: least_steps = 0
  end type

  type, bind(c) :: sluice_plan_config_t
    integer(c_size_t) :: struct_size = 88
    type(c_ptr) :: next = c_null_ptr
    integer(c_int64_t) :: max_tokens = 0
    integer(c_int64_t) :: memory_budget = 0
    integer(c_int64_t) :: base_bytes = 0
    integer(c_int32_t) :: max_outstanding = 0
    integer(c_int32_t) :: num_chunks = 0
    integer(c_int32_t) :: restore_input = 0
    integer(c_int32_t) :: restore_pre_activation = 0
    integer(c_int32_t) :: wgrad_mode = 0
    integer(c_int32_t) :: separate_wgrad = 0
    integer(c_int64_t) :: host_memory_budget = 0
    type(c_ptr) :: restore_input_of = c_null_ptr
    type(c_ptr) :: restore_pre_activation_of = c_null_ptr
  end type

  type, bind(c) :: sluice_plan_info_t
    integer(c_size_t) :: struct_size = 208
    integer(c_int64_t) :: max_tokens = 0
    integer(c_int64_t) :: chunk_rows = 0
    integer(c_int64_t) :: kept_rows = 0
    integer(c_int32_t) :: num_blocks = 0
    integer(c_int32_t) :: num_chunks = 0
    integer(c_int32_t) :: max_chunks = 0
    integer(c_int32_t) :: restore_input = 0
    integer(c_int32_t) :: restore_pre_activation = 0
    integer(c_int32_t) :: wgrad_mode = 0
    integer(c_int32_t) :: max_outstanding = 0
    integer(c_int32_t) :: kept_chunks = 0
    integer(c_int64_t) :: base_bytes = 0
    integer(c_int64_t) :: slot_bytes = 0
    integer(c_int64_t) :: routing_bytes = 0
    integer(c_int64_t) :: schedule_bytes = 0
    integer(c_int64_t) :: header_bytes = 0
    integer(c_int64_t) :: gemm_bytes = 0
    integer(c_int64_t) :: step_bytes = 0
    integer(c_int64_t) :: total_bytes = 0
    real(c_double) :: relative_time = 0
    integer(c_int64_t) :: host_pool_bytes = 0
    integer(c_int64_t) :: communication_bytes = 0
    integer(c_int64_t) :: saved_bytes = 0
    integer(c_int64_t) :: deferred_bytes = 0
    integer(c_int64_t) :: peak_slot_bytes = 0
    integer(c_int32_t) :: peak_direction = 0
    character(kind=c_char) :: peak_op(28) = c_null_char
  end type

  type, bind(c) :: sluice_plan_candidate_t
    integer(c_int32_t) :: num_chunks = 0
    integer(c_int32_t) :: restore_input = 0
    integer(c_int32_t) :: restore_pre_activation = 0
    integer(c_int32_t) :: wgrad_mode = 0
    integer(c_int64_t) :: total_bytes = 0
    real(c_double) :: relative_time = 0
    integer(c_int32_t) :: fits = 0
    integer(c_int32_t) :: kept_chunks = 0
  end type

  type, bind(c) :: sluice_paper_footprint_t
    real(c_double) :: states = 0
    real(c_double) :: activations = 0
    real(c_double) :: temporaries = 0
    real(c_double) :: pipelined_temporaries = 0
    real(c_double) :: saving = 0
    real(c_double) :: saved_share = 0
  end type

  type, bind(c) :: sluice_calibration_config_t
    integer(c_size_t) :: struct_size = 56
    type(c_ptr) :: next = c_null_ptr
    integer(c_int64_t) :: model_width = 0
    integer(c_int64_t) :: hidden_width = 0
    real(c_double) :: seconds = 0
    type(c_ptr) :: cache_dir = c_null_ptr
    integer(c_int32_t) :: dtype = 0
    integer(c_int32_t) :: refresh = 0
  end type

  type, bind(c) :: sluice_planner_workload_t
    integer(c_size_t) :: struct_size = 136
    type(c_ptr) :: next = c_null_ptr
    integer(c_int64_t) :: model_width = 0
    integer(c_int64_t) :: hidden_width = 0
    integer(c_int64_t) :: num_tokens = 0
    integer(c_int64_t) :: memory_budget = 0
    real(c_double) :: skew = 0
    integer(c_int32_t) :: num_experts = 0
    integer(c_int32_t) :: top_k = 0
    integer(c_int32_t) :: world_size = 0
    integer(c_int32_t) :: dtype = 0
    integer(c_int32_t) :: gated = 0
    integer(c_int32_t) :: callback_experts = 0
    integer(c_int32_t) :: max_outstanding = 0
    integer(c_int32_t) :: reserved = 0
    integer(c_int64_t) :: host_memory_budget = 0
    integer(c_int32_t) :: deduplicate = 0
    integer(c_int32_t) :: chunking = 0
    type(c_ptr) :: restore_input_of = c_null_ptr
    type(c_ptr) :: restore_pre_activation_of = c_null_ptr
    integer(c_int32_t) :: kept_chunks = 0
    integer(c_int32_t) :: may_keep_part = 0
    integer(c_int32_t) :: activation = 0
    integer(c_int32_t) :: grouped = 0
  end type

  type, bind(c) :: sluice_planner_choice_t
    integer(c_int32_t) :: num_chunks = 0
    integer(c_int32_t) :: restore_input = 0
    integer(c_int32_t) :: restore_pre_activation = 0
    integer(c_int32_t) :: wgrad_mode = 0
  end type

  type, bind(c) :: sluice_planner_prediction_t
    integer(c_size_t) :: struct_size = 248
    real(c_double) :: forward_seconds = 0
    real(c_double) :: backward_seconds = 0
    real(c_double) :: forward_busy(4) = 0
    real(c_double) :: backward_busy(4) = 0
    real(c_double) :: overhead_seconds = 0
    real(c_double) :: mpmoe_forward_seconds = 0
    real(c_double) :: mpmoe_backward_seconds = 0
    real(c_double) :: mpipemoe_forward_seconds = 0
    real(c_double) :: mpipemoe_backward_seconds = 0
    real(c_double) :: machine_error_median = 0
    real(c_double) :: machine_error_p90 = 0
    integer(c_int64_t) :: chunk_rows = 0
    integer(c_int64_t) :: base_bytes = 0
    integer(c_int64_t) :: slot_bytes = 0
    integer(c_int64_t) :: routing_bytes = 0
    integer(c_int64_t) :: schedule_bytes = 0
    integer(c_int64_t) :: header_bytes = 0
    integer(c_int64_t) :: gemm_bytes = 0
    integer(c_int64_t) :: step_bytes = 0
    integer(c_int64_t) :: total_bytes = 0
    integer(c_int32_t) :: fits = 0
    integer(c_int32_t) :: num_entries = 0
    integer(c_int32_t) :: max_chunks = 0
    integer(c_int32_t) :: run_chunks = 0
    real(c_double) :: sent_rows = 0
    integer(c_int32_t) :: kept_chunks = 0
    integer(c_int32_t) :: reserved = 0
  end type

  type, bind(c) :: sluice_planner_entry_t
    real(c_double) :: begin_seconds = 0
    real(c_double) :: end_seconds = 0
    type(c_ptr) :: op = c_null_ptr
    integer(c_int32_t) :: direction = 0
    integer(c_int32_t) :: lane = 0
    integer(c_int32_t) :: chunk = 0
    integer(c_int32_t) :: index = 0
  end type

  type, bind(c) :: sluice_planner_candidate_t
    type(sluice_planner_choice_t) :: choice
    integer(c_int32_t) :: verdict = 0
    integer(c_int32_t) :: kept_chunks = 0
    real(c_double) :: forward_seconds = 0
    real(c_double) :: backward_seconds = 0
    real(c_double) :: slower_by = 0
    integer(c_int64_t) :: total_bytes = 0
    integer(c_int64_t) :: bytes_over = 0
  end type

  type, bind(c) :: sluice_schedule_config_t
    integer(c_size_t) :: struct_size = 96
    type(c_ptr) :: next = c_null_ptr
    integer(c_int32_t) :: direction = 0
    integer(c_int32_t) :: num_chunks = 0
    integer(c_int32_t) :: single_rank = 0
    integer(c_int32_t) :: needs_backward = 0
    integer(c_int32_t) :: callback_experts = 0
    integer(c_int32_t) :: gated = 0
    integer(c_int32_t) :: dgrad = 0
    integer(c_int32_t) :: wgrad = 0
    integer(c_int32_t) :: wgrad_mode = 0
    integer(c_int32_t) :: may_reuse_saved = 0
    integer(c_int32_t) :: under_plan = 0
    integer(c_int32_t) :: restore_input = 0
    integer(c_int32_t) :: restore_pre_activation = 0
    integer(c_int32_t) :: grouped = 0
    type(c_ptr) :: restore_input_of = c_null_ptr
    type(c_ptr) :: restore_pre_activation_of = c_null_ptr
    integer(c_int32_t) :: deduplicate = 0
    integer(c_int32_t) :: chunks_by_experts = 0
  end type

  type, bind(c) :: sluice_schedule_prediction_t
    integer(c_size_t) :: struct_size = 48
    real(c_double) :: seconds = 0
    real(c_double) :: busy_seconds(4) = 0
  end type

  type, bind(c) :: sluice_stages_option_t
    real(c_double) :: forward_seconds = 0
    real(c_double) :: backward_seconds = 0
    integer(c_int64_t) :: resident_bytes = 0
    integer(c_int64_t) :: held_bytes = 0
    integer(c_int64_t) :: copied_bytes = 0
    integer(c_int64_t) :: working_bytes = 0
    integer(c_int64_t) :: arena_bytes = 0
    integer(c_int32_t) :: kind = 0
    integer(c_int32_t) :: tag = 0
  end type

  type, bind(c) :: sluice_stages_edge_t
    integer(c_int32_t) :: from = 0
    integer(c_int32_t) :: to = 0
  end type

  type, bind(c) :: sluice_stages_link_t
    real(c_double) :: bytes_per_second = 0
    real(c_double) :: latency_seconds = 0
    integer(c_int32_t) :: full_duplex = 0
    integer(c_int32_t) :: reserved = 0
  end type

  type, bind(c) :: sluice_planner_layer_t
    integer(c_size_t) :: struct_size = 136
    type(c_ptr) :: next = c_null_ptr
    real(c_double) :: forward_seconds = 0
    real(c_double) :: backward_seconds = 0
    real(c_double) :: recompute_seconds = 0
    integer(c_int64_t) :: activation_bytes = 0
    integer(c_int64_t) :: checkpoint_bytes = 0
    integer(c_int64_t) :: workspace_bytes = 0
    integer(c_int64_t) :: parameter_bytes = 0
    integer(c_int64_t) :: state_bytes = 0
    integer(c_int64_t) :: output_bytes = 0
    type(c_ptr) :: planner = c_null_ptr
    type(c_ptr) :: moe = c_null_ptr
    type(c_ptr) :: wanted = c_null_ptr
    type(c_ptr) :: options = c_null_ptr
    integer(c_int32_t) :: num_options = 0
    integer(c_int32_t) :: may_recompute = 0
    integer(c_int32_t) :: may_offload = 0
    integer(c_int32_t) :: reserved = 0
  end type

  type, bind(c) :: sluice_planner_problem_t
    integer(c_size_t) :: struct_size = 112
    type(c_ptr) :: next = c_null_ptr
    type(c_ptr) :: layers = c_null_ptr
    type(c_ptr) :: edges = c_null_ptr
    type(c_ptr) :: links = c_null_ptr
    type(c_ptr) :: budget_bytes = c_null_ptr
    type(c_ptr) :: in_flight = c_null_ptr
    integer(c_int64_t) :: base_bytes = 0
    real(c_double) :: copy_bytes_per_second = 0
    integer(c_int32_t) :: num_layers = 0
    integer(c_int32_t) :: num_edges = 0
    integer(c_int32_t) :: num_stages = 0
    integer(c_int32_t) :: num_micro_batches = 0
    integer(c_int32_t) :: schedule = 0
    integer(c_int32_t) :: in_flight_limit = 0
    integer(c_int32_t) :: weight_versions = 0
    integer(c_int32_t) :: copies_share_links = 0
    integer(c_int32_t) :: method = 0
    integer(c_int32_t) :: reserved = 0
  end type

  type, bind(c) :: sluice_stages_choice_t
    integer(c_int32_t) :: stage = 0
    integer(c_int32_t) :: kind = 0
    integer(c_int32_t) :: option = 0
    integer(c_int32_t) :: fastest = 0
    integer(c_int32_t) :: reason = 0
    integer(c_int32_t) :: reserved = 0
    integer(c_int64_t) :: reason_bytes = 0
    real(c_double) :: reason_seconds = 0
  end type

  type, bind(c) :: sluice_stages_other_cut_t
    real(c_double) :: slowest_seconds = 0
    integer(c_int64_t) :: short_bytes = 0
    integer(c_int32_t) :: layer = 0
    integer(c_int32_t) :: reserved = 0
  end type

  type, bind(c) :: sluice_stages_stage_t
    real(c_double) :: seconds = 0
    real(c_double) :: compute_seconds = 0
    real(c_double) :: extra_seconds = 0
    real(c_double) :: message_seconds = 0
    real(c_double) :: copy_seconds = 0
    integer(c_int64_t) :: bytes = 0
    integer(c_int64_t) :: base_bytes = 0
    integer(c_int64_t) :: parameter_bytes = 0
    integer(c_int64_t) :: state_bytes = 0
    integer(c_int64_t) :: message_bytes = 0
    integer(c_int64_t) :: resident_bytes = 0
    integer(c_int64_t) :: held_bytes = 0
    integer(c_int64_t) :: working_bytes = 0
    integer(c_int64_t) :: staging_bytes = 0
    integer(c_int64_t) :: arena_bytes = 0
    integer(c_int64_t) :: host_bytes = 0
    integer(c_int64_t) :: peak_bytes = 0
    integer(c_int64_t) :: budget_bytes = 0
    integer(c_int32_t) :: in_flight = 0
    integer(c_int32_t) :: num_layers = 0
    type(sluice_stages_other_cut_t) :: begins_earlier
    type(sluice_stages_other_cut_t) :: begins_later
  end type

  type, bind(c) :: sluice_planner_result_t
    integer(c_size_t) :: struct_size = 112
    type(c_ptr) :: next = c_null_ptr
    type(c_ptr) :: choices = c_null_ptr
    type(c_ptr) :: stages = c_null_ptr
    type(c_ptr) :: moe = c_null_ptr
    type(c_ptr) :: text = c_null_ptr
    integer(c_int64_t) :: text_room = 0
    integer(c_int64_t) :: text_bytes = 0
    real(c_double) :: slowest_seconds = 0
    real(c_double) :: step_seconds = 0
    integer(c_int64_t) :: smallest_budget_bytes = 0
    integer(c_int64_t) :: short_bytes = 0
    integer(c_int32_t) :: slowest_stage = 0
    integer(c_int32_t) :: blocking_stage = 0
    integer(c_int32_t) :: is_optimal = 0
    integer(c_int32_t) :: num_rounds = 0
  end type

  type, bind(c) :: sluice_tuner_config_t
    integer(c_size_t) :: struct_size = 32
    type(c_ptr) :: next = c_null_ptr
    integer(c_int32_t) :: mode = 0
    integer(c_int32_t) :: reserved = 0
    type(c_ptr) :: machine = c_null_ptr
  end type

  type, bind(c) :: sluice_tuner_decision_t
    integer(c_int64_t) :: model_width = 0
    integer(c_int64_t) :: hidden_width = 0
    integer(c_int32_t) :: num_experts = 0
    integer(c_int32_t) :: top_k = 0
    integer(c_int32_t) :: dtype = 0
    integer(c_int32_t) :: gated = 0
    integer(c_int64_t) :: rows = 0
    integer(c_int32_t) :: num_chunks = 0
    integer(c_int32_t) :: wgrad_mode = 0
    integer(c_int32_t) :: why = 0
    integer(c_int32_t) :: num_raced = 0
    integer(c_int64_t) :: race_passes = 0
    real(c_double) :: seconds = 0
    real(c_double) :: predicted_seconds = 0
    real(c_double) :: runner_up_seconds = 0
    integer(c_int32_t) :: runner_up_chunks = 0
    integer(c_int32_t) :: runner_up_wgrad_mode = 0
  end type

  type, bind(c) :: sluice_tuner_policy_t
    integer(c_int32_t) :: restore_input = 0
    integer(c_int32_t) :: restore_pre_activation = 0
    integer(c_int32_t) :: runner_up_restore_input = 0
    integer(c_int32_t) :: runner_up_restore_pre_activation = 0
    integer(c_int64_t) :: memory_budget = 0
    integer(c_int64_t) :: total_bytes = 0
  end type

  type, bind(c) :: sluice_tuner_stats_t
    integer(c_size_t) :: struct_size = 112
    integer(c_int64_t) :: timed_passes = 0
    integer(c_int64_t) :: race_passes = 0
    integer(c_int64_t) :: num_decisions = 0
    integer(c_int64_t) :: num_switches = 0
    integer(c_int64_t) :: num_questioned = 0
    integer(c_int64_t) :: num_changed = 0
    integer(c_int64_t) :: monotonic = 0
    integer(c_int64_t) :: not_monotonic = 0
    real(c_double) :: total_seconds = 0
    real(c_double) :: excess_seconds = 0
    real(c_double) :: switch_seconds = 0
    integer(c_int64_t) :: one_valley = 0
    integer(c_int64_t) :: not_one_valley = 0
  end type

  interface
    subroutine sluice_error_info_init(out_info, struct_size) bind(c, name="sluice_error_info_init")
      import
      type(sluice_error_info_t), intent(inout), optional :: out_info
      integer(c_size_t), value :: struct_size
    end subroutine
    subroutine sluice_error_last(out_info) bind(c, name="sluice_error_last")
      import
      type(sluice_error_info_t), intent(inout), optional :: out_info
    end subroutine
    function sluice_status_name(status) bind(c, name="sluice_status_name") result(it)
      import
      integer(c_int32_t), value :: status
      type(c_ptr) :: it
    end function
    subroutine sluice_version(out_major, out_minor, out_patch) bind(c, name="sluice_version")
      import
      integer(c_int32_t), intent(inout), optional :: out_major
      integer(c_int32_t), intent(inout), optional :: out_minor
      integer(c_int32_t), intent(inout), optional :: out_patch
    end subroutine
    function sluice_build_info() bind(c, name="sluice_build_info") result(it)
      import
      type(c_ptr) :: it
    end function
    subroutine sluice_set_log(fn, user, max_level) bind(c, name="sluice_set_log")
      import
      type(c_funptr), value :: fn
      type(c_ptr), value :: user
      integer(c_int32_t), value :: max_level
    end subroutine
    subroutine sluice_comm_config_init(out_config, struct_size) bind(c, name="sluice_comm_config_init")
      import
      type(sluice_comm_config_t), intent(inout), optional :: out_config
      integer(c_size_t), value :: struct_size
    end subroutine
    function sluice_local_group_create(world_size, out_group) bind(c, name="sluice_local_group_create") result(it)
      import
      integer(c_int32_t), value :: world_size
      type(c_ptr), intent(inout), optional :: out_group
      integer(c_int32_t) :: it
    end function
    subroutine sluice_local_group_destroy(group) bind(c, name="sluice_local_group_destroy")
      import
      type(c_ptr), value :: group
    end subroutine
    function sluice_comm_create_local(group, config, out_comm) bind(c, name="sluice_comm_create_local") result(it)
      import
      type(c_ptr), value :: group
      type(sluice_comm_config_t), intent(in), optional :: config
      type(c_ptr), intent(inout), optional :: out_comm
      integer(c_int32_t) :: it
    end function
    function sluice_comm_create_host(config, vtable, user, out_comm) bind(c, name="sluice_comm_create_host") result(it)
      import
      type(sluice_comm_config_t), intent(in), optional :: config
      type(sluice_host_comm_vtable_t), intent(in), optional :: vtable
      type(c_ptr), value :: user
      type(c_ptr), intent(inout), optional :: out_comm
      integer(c_int32_t) :: it
    end function
    function sluice_comm_create_mpi(config, mpi_comm_f, library, out_comm) bind(c, name="sluice_comm_create_mpi") &
      result(it)
      import
      type(sluice_comm_config_t), intent(in), optional :: config
      integer(c_int64_t), value :: mpi_comm_f
      character(kind=c_char), intent(in), optional :: library(*)
      type(c_ptr), intent(inout), optional :: out_comm
      integer(c_int32_t) :: it
    end function
    subroutine sluice_nccl_group_init(out_group, struct_size) bind(c, name="sluice_nccl_group_init")
      import
      type(sluice_nccl_group_t), intent(inout), optional :: out_group
      integer(c_size_t), value :: struct_size
    end subroutine
    function sluice_nccl_id_create(library, out_id) bind(c, name="sluice_nccl_id_create") result(it)
      import
      character(kind=c_char), intent(in), optional :: library(*)
      type(c_ptr), value :: out_id
      integer(c_int32_t) :: it
    end function
    function sluice_comm_create_nccl(config, group, out_comm) bind(c, name="sluice_comm_create_nccl") result(it)
      import
      type(sluice_comm_config_t), intent(in), optional :: config
      type(sluice_nccl_group_t), intent(in), optional :: group
      type(c_ptr), intent(inout), optional :: out_comm
      integer(c_int32_t) :: it
    end function
    subroutine sluice_tcp_config_init(out_config, struct_size) bind(c, name="sluice_tcp_config_init")
      import
      type(sluice_tcp_config_t), intent(inout), optional :: out_config
      integer(c_size_t), value :: struct_size
    end subroutine
    function sluice_comm_create_tcp(parent, config, out_comm) bind(c, name="sluice_comm_create_tcp") result(it)
      import
      type(c_ptr), value :: parent
      type(sluice_tcp_config_t), intent(in), optional :: config
      type(c_ptr), intent(inout), optional :: out_comm
      integer(c_int32_t) :: it
    end function
    function sluice_comm_rank(comm) bind(c, name="sluice_comm_rank") result(it)
      import
      type(c_ptr), value :: comm
      integer(c_int32_t) :: it
    end function
    function sluice_comm_world_size(comm) bind(c, name="sluice_comm_world_size") result(it)
      import
      type(c_ptr), value :: comm
      integer(c_int32_t) :: it
    end function
    function sluice_comm_name(comm) bind(c, name="sluice_comm_name") result(it)
      import
      type(c_ptr), value :: comm
      type(c_ptr) :: it
    end function
    subroutine sluice_comm_abort(comm) bind(c, name="sluice_comm_abort")
      import
      type(c_ptr), value :: comm
    end subroutine
    subroutine sluice_comm_destroy(comm) bind(c, name="sluice_comm_destroy")
      import
      type(c_ptr), value :: comm
    end subroutine
    subroutine sluice_context_config_init(out_config, struct_size) bind(c, name="sluice_context_config_init")
      import
      type(sluice_context_config_t), intent(inout), optional :: out_config
      integer(c_size_t), value :: struct_size
    end subroutine
    function sluice_context_create(config, comm, out_context) bind(c, name="sluice_context_create") result(it)
      import
      type(sluice_context_config_t), intent(in), optional :: config
      type(c_ptr), value :: comm
      type(c_ptr), intent(inout), optional :: out_context
      integer(c_int32_t) :: it
    end function
    subroutine sluice_context_destroy(context) bind(c, name="sluice_context_destroy")
      import
      type(c_ptr), value :: context
    end subroutine
    function sluice_context_set_share(context, memory_budget, whole) bind(c, name="sluice_context_set_share") result(it)
      import
      type(c_ptr), value :: context
      integer(c_int64_t), value :: memory_budget
      integer(c_int64_t), value :: whole
      integer(c_int32_t) :: it
    end function
    function sluice_context_allocate_saved(context, which, bytes, out_data) bind(c, name="sluice_context_allocate_saved") &
      result(it)
      import
      type(c_ptr), value :: context
      integer(c_int32_t), value :: which
      integer(c_int64_t), value :: bytes
      type(c_ptr), intent(inout), optional :: out_data
      integer(c_int32_t) :: it
    end function
    function sluice_context_allocate(context, bytes, out_data) bind(c, name="sluice_context_allocate") result(it)
      import
      type(c_ptr), value :: context
      integer(c_int64_t), value :: bytes
      type(c_ptr), intent(inout), optional :: out_data
      integer(c_int32_t) :: it
    end function
    subroutine sluice_context_free(context, data, bytes) bind(c, name="sluice_context_free")
      import
      type(c_ptr), value :: context
      type(c_ptr), value :: data
      integer(c_int64_t), value :: bytes
    end subroutine
    function sluice_context_get_stats(context, reset_peak, out_stats) bind(c, name="sluice_context_get_stats") result(it)
      import
      type(c_ptr), value :: context
      integer(c_int32_t), value :: reset_peak
      type(sluice_context_stats_t), intent(inout), optional :: out_stats
      integer(c_int32_t) :: it
    end function
    function sluice_context_trace(context, capacity) bind(c, name="sluice_context_trace") result(it)
      import
      type(c_ptr), value :: context
      integer(c_int64_t), value :: capacity
      integer(c_int32_t) :: it
    end function
    function sluice_context_take_trace(context, out_events, capacity, out_count) bind(c, name="sluice_context_take_trace") &
      result(it)
      import
      type(c_ptr), value :: context
      type(sluice_trace_event_t), intent(inout), optional :: out_events
      integer(c_int64_t), value :: capacity
      integer(c_int64_t), intent(inout), optional :: out_count
      integer(c_int32_t) :: it
    end function
    subroutine sluice_gate_config_init(out_config, struct_size) bind(c, name="sluice_gate_config_init")
      import
      type(sluice_gate_config_t), intent(inout), optional :: out_config
      integer(c_size_t), value :: struct_size
    end subroutine
    function sluice_gate_forward(config, logits, bias, expert_ids, route_weights, counts, out_aux_loss, out_z_loss) &
      bind(c, name="sluice_gate_forward") result(it)
      import
      type(sluice_gate_config_t), intent(in), optional :: config
      type(sluice_tensor_t), intent(in), optional :: logits
      type(sluice_tensor_t), intent(in), optional :: bias
      type(sluice_tensor_t), intent(in), optional :: expert_ids
      type(sluice_tensor_t), intent(in), optional :: route_weights
      type(sluice_tensor_t), intent(in), optional :: counts
      real(c_float), intent(inout), optional :: out_aux_loss
      real(c_float), intent(inout), optional :: out_z_loss
      integer(c_int32_t) :: it
    end function
    function sluice_gate_backward(config, logits, bias, expert_ids, grad_route_weights, grad_aux_loss, grad_z_loss, &
      grad_logits) bind(c, name="sluice_gate_backward") result(it)
      import
      type(sluice_gate_config_t), intent(in), optional :: config
      type(sluice_tensor_t), intent(in), optional :: logits
      type(sluice_tensor_t), intent(in), optional :: bias
      type(sluice_tensor_t), intent(in), optional :: expert_ids
      type(sluice_tensor_t), intent(in), optional :: grad_route_weights
      real(c_float), value :: grad_aux_loss
      real(c_float), value :: grad_z_loss
      type(sluice_tensor_t), intent(in), optional :: grad_logits
      integer(c_int32_t) :: it
    end function
    subroutine sluice_migration_config_init(out_config, struct_size) bind(c, name="sluice_migration_config_init")
      import
      type(sluice_migration_config_t), intent(inout), optional :: out_config
      integer(c_size_t), value :: struct_size
    end subroutine
    function sluice_migration_create(comm, config, out_migration) bind(c, name="sluice_migration_create") result(it)
      import
      type(c_ptr), value :: comm
      type(sluice_migration_config_t), intent(in), optional :: config
      type(c_ptr), intent(inout), optional :: out_migration
      integer(c_int32_t) :: it
    end function
    subroutine sluice_migration_destroy(migration) bind(c, name="sluice_migration_destroy")
      import
      type(c_ptr), value :: migration
    end subroutine
    function sluice_migration_begin(migration, epoch, items, num_items) bind(c, name="sluice_migration_begin") result(it)
      import
      type(c_ptr), value :: migration
      integer(c_int64_t), value :: epoch
      type(sluice_migration_item_t), intent(in), optional :: items
      integer(c_int32_t), value :: num_items
      integer(c_int32_t) :: it
    end function
    function sluice_migration_read_early(migration, id, peer, to, num_spans, out_is_there) bind(c, &
      name="sluice_migration_read_early") result(it)
      import
      type(c_ptr), value :: migration
      integer(c_int64_t), value :: id
      integer(c_int32_t), value :: peer
      type(sluice_migration_span_t), intent(in), optional :: to
      integer(c_int32_t), value :: num_spans
      integer(c_int32_t), intent(inout), optional :: out_is_there
      integer(c_int32_t) :: it
    end function
    function sluice_migration_mark_still(migration, id, peer) bind(c, name="sluice_migration_mark_still") result(it)
      import
      type(c_ptr), value :: migration
      integer(c_int64_t), value :: id
      integer(c_int32_t), value :: peer
      integer(c_int32_t) :: it
    end function
    function sluice_migration_commit(migration, refusal) bind(c, name="sluice_migration_commit") result(it)
      import
      type(c_ptr), value :: migration
      character(kind=c_char), intent(in), optional :: refusal(*)
      integer(c_int32_t) :: it
    end function
    function sluice_migration_settle(migration, comm, out_epoch) bind(c, name="sluice_migration_settle") result(it)
      import
      type(c_ptr), value :: migration
      type(c_ptr), value :: comm
      integer(c_int64_t), intent(inout), optional :: out_epoch
      integer(c_int32_t) :: it
    end function
    subroutine sluice_migration_abort(migration, reason) bind(c, name="sluice_migration_abort")
      import
      type(c_ptr), value :: migration
      character(kind=c_char), intent(in), optional :: reason(*)
    end subroutine
    function sluice_migration_get_progress(migration, out_progress) bind(c, name="sluice_migration_get_progress") &
      result(it)
      import
      type(c_ptr), value :: migration
      type(sluice_migration_progress_t), intent(inout), optional :: out_progress
      integer(c_int32_t) :: it
    end function
    function sluice_migration_phase_name(phase) bind(c, name="sluice_migration_phase_name") result(it)
      import
      integer(c_int32_t), value :: phase
      type(c_ptr) :: it
    end function
    function sluice_restore_policies_json(text, inout_bytes) bind(c, name="sluice_restore_policies_json") result(it)
      import
      character(kind=c_char), intent(inout), optional :: text(*)
      integer(c_int64_t), intent(inout), optional :: inout_bytes
      integer(c_int32_t) :: it
    end function
    subroutine sluice_moe_config_init(out_config, struct_size) bind(c, name="sluice_moe_config_init")
      import
      type(sluice_moe_config_t), intent(inout), optional :: out_config
      integer(c_size_t), value :: struct_size
    end subroutine
    function sluice_moe_create(context, config, out_moe) bind(c, name="sluice_moe_create") result(it)
      import
      type(c_ptr), value :: context
      type(sluice_moe_config_t), intent(in), optional :: config
      type(c_ptr), intent(inout), optional :: out_moe
      integer(c_int32_t) :: it
    end function
    subroutine sluice_moe_destroy(moe) bind(c, name="sluice_moe_destroy")
      import
      type(c_ptr), value :: moe
    end subroutine
    function sluice_moe_num_local_experts(moe) bind(c, name="sluice_moe_num_local_experts") result(it)
      import
      type(c_ptr), value :: moe
      integer(c_int32_t) :: it
    end function
    subroutine sluice_expert_placement_init(out_placement, struct_size) bind(c, name="sluice_expert_placement_init")
      import
      type(sluice_expert_placement_t), intent(inout), optional :: out_placement
      integer(c_size_t), value :: struct_size
    end subroutine
    function sluice_moe_replace_experts(moe, placement) bind(c, name="sluice_moe_replace_experts") result(it)
      import
      type(c_ptr), value :: moe
      type(sluice_expert_placement_t), intent(in), optional :: placement
      integer(c_int32_t) :: it
    end function
    function sluice_moe_get_placement(moe, out_expert_rank, out_expert_slot, out_epoch) bind(c, &
      name="sluice_moe_get_placement") result(it)
      import
      type(c_ptr), value :: moe
      integer(c_int32_t), intent(inout), optional :: out_expert_rank
      integer(c_int32_t), intent(inout), optional :: out_expert_slot
      integer(c_int64_t), intent(inout), optional :: out_epoch
      integer(c_int32_t) :: it
    end function
    function sluice_moe_get_loads(moe, out_expert_rows, out_rank_rows, out_num_forwards) bind(c, &
      name="sluice_moe_get_loads") result(it)
      import
      type(c_ptr), value :: moe
      integer(c_int64_t), intent(inout), optional :: out_expert_rows
      integer(c_int64_t), intent(inout), optional :: out_rank_rows
      integer(c_int64_t), intent(inout), optional :: out_num_forwards
      integer(c_int32_t) :: it
    end function
    subroutine sluice_moe_forward_args_init(out_args, struct_size) bind(c, name="sluice_moe_forward_args_init")
      import
      type(sluice_moe_forward_args_t), intent(inout), optional :: out_args
      integer(c_size_t), value :: struct_size
    end subroutine
    function sluice_moe_forward(moe, args, stream, out_step) bind(c, name="sluice_moe_forward") result(it)
      import
      type(c_ptr), value :: moe
      type(sluice_moe_forward_args_t), intent(in), optional :: args
      type(c_ptr), value :: stream
      type(c_ptr), intent(inout), optional :: out_step
      integer(c_int32_t) :: it
    end function
    subroutine sluice_step_drop(step) bind(c, name="sluice_step_drop")
      import
      type(c_ptr), value :: step
    end subroutine
    function sluice_step_restore(moe, saved, saved_bytes, out_step) bind(c, name="sluice_step_restore") result(it)
      import
      type(c_ptr), value :: moe
      type(c_ptr), intent(in), optional :: saved
      integer(c_int64_t), intent(in), optional :: saved_bytes
      type(c_ptr), intent(inout), optional :: out_step
      integer(c_int32_t) :: it
    end function
    function sluice_step_info(step, out_num_chunks, out_rows_per_expert) bind(c, name="sluice_step_info") result(it)
      import
      type(c_ptr), value :: step
      integer(c_int32_t), intent(inout), optional :: out_num_chunks
      integer(c_int64_t), intent(inout), optional :: out_rows_per_expert
      integer(c_int32_t) :: it
    end function
    subroutine sluice_moe_backward_args_init(out_args, struct_size) bind(c, name="sluice_moe_backward_args_init")
      import
      type(sluice_moe_backward_args_t), intent(inout), optional :: out_args
      integer(c_size_t), value :: struct_size
    end subroutine
    function sluice_moe_backward(moe, step, args, stream) bind(c, name="sluice_moe_backward") result(it)
      import
      type(c_ptr), value :: moe
      type(c_ptr), value :: step
      type(sluice_moe_backward_args_t), intent(in), optional :: args
      type(c_ptr), value :: stream
      integer(c_int32_t) :: it
    end function
    subroutine sluice_capacity_report_init(out_report, struct_size) bind(c, name="sluice_capacity_report_init")
      import
      type(sluice_capacity_report_t), intent(inout), optional :: out_report
      integer(c_size_t), value :: struct_size
    end subroutine
    function sluice_moe_take_capacity_report(moe, stream, out_report) bind(c, name="sluice_moe_take_capacity_report") &
      result(it)
      import
      type(c_ptr), value :: moe
      type(c_ptr), value :: stream
      type(sluice_capacity_report_t), intent(inout), optional :: out_report
      integer(c_int32_t) :: it
    end function
    subroutine sluice_optimizer_config_init(out_config, struct_size) bind(c, name="sluice_optimizer_config_init")
      import
      type(sluice_optimizer_config_t), intent(inout), optional :: out_config
      integer(c_size_t), value :: struct_size
    end subroutine
    subroutine sluice_optimizer_group_init(out_group, struct_size) bind(c, name="sluice_optimizer_group_init")
      import
      type(sluice_optimizer_group_t), intent(inout), optional :: out_group
      integer(c_size_t), value :: struct_size
    end subroutine
    subroutine sluice_optimizer_step_args_init(out_args, struct_size) bind(c, name="sluice_optimizer_step_args_init")
      import
      type(sluice_optimizer_step_args_t), intent(inout), optional :: out_args
      integer(c_size_t), value :: struct_size
    end subroutine
    subroutine sluice_optimizer_step_result_init(out_result, struct_size) bind(c, &
      name="sluice_optimizer_step_result_init")
      import
      type(sluice_optimizer_step_result_t), intent(inout), optional :: out_result
      integer(c_size_t), value :: struct_size
    end subroutine
    function sluice_optimizer_create(config, out_optimizer) bind(c, name="sluice_optimizer_create") result(it)
      import
      type(sluice_optimizer_config_t), intent(in), optional :: config
      type(c_ptr), intent(inout), optional :: out_optimizer
      integer(c_int32_t) :: it
    end function
    function sluice_optimizer_step(optimizer, args, out_result) bind(c, name="sluice_optimizer_step") result(it)
      import
      type(c_ptr), value :: optimizer
      type(sluice_optimizer_step_args_t), intent(in), optional :: args
      type(sluice_optimizer_step_result_t), intent(inout), optional :: out_result
      integer(c_int32_t) :: it
    end function
    subroutine sluice_optimizer_destroy(optimizer) bind(c, name="sluice_optimizer_destroy")
      import
      type(c_ptr), value :: optimizer
    end subroutine
    subroutine sluice_optimizer_file_config_init(out_config, struct_size) bind(c, &
      name="sluice_optimizer_file_config_init")
      import
      type(sluice_optimizer_file_config_t), intent(inout), optional :: out_config
      integer(c_size_t), value :: struct_size
    end subroutine
    function sluice_optimizer_file_create(config, groups, num_groups, out_file) bind(c, &
      name="sluice_optimizer_file_create") result(it)
      import
      type(sluice_optimizer_file_config_t), intent(in), optional :: config
      type(c_ptr), intent(in), optional :: groups
      integer(c_int64_t), value :: num_groups
      type(c_ptr), intent(inout), optional :: out_file
      integer(c_int32_t) :: it
    end function
    function sluice_optimizer_file_open(config, out_file) bind(c, name="sluice_optimizer_file_open") result(it)
      import
      type(sluice_optimizer_file_config_t), intent(in), optional :: config
      type(c_ptr), intent(inout), optional :: out_file
      integer(c_int32_t) :: it
    end function
    function sluice_optimizer_file_load(file, groups, num_groups) bind(c, name="sluice_optimizer_file_load") result(it)
      import
      type(c_ptr), value :: file
      type(c_ptr), intent(in), optional :: groups
      integer(c_int64_t), value :: num_groups
      integer(c_int32_t) :: it
    end function
    subroutine sluice_optimizer_file_info_init(out_info, struct_size) bind(c, name="sluice_optimizer_file_info_init")
      import
      type(sluice_optimizer_file_info_t), intent(inout), optional :: out_info
      integer(c_size_t), value :: struct_size
    end subroutine
    function sluice_optimizer_file_info(file, out_info) bind(c, name="sluice_optimizer_file_info") result(it)
      import
      type(c_ptr), value :: file
      type(sluice_optimizer_file_info_t), intent(inout), optional :: out_info
      integer(c_int32_t) :: it
    end function
    subroutine sluice_optimizer_file_close(file) bind(c, name="sluice_optimizer_file_close")
      import
      type(c_ptr), value :: file
    end subroutine
    subroutine sluice_optimizer_workload_init(out_workload, struct_size) bind(c, name="sluice_optimizer_workload_init")
      import
      type(sluice_optimizer_workload_t), intent(inout), optional :: out_workload
      integer(c_size_t), value :: struct_size
    end subroutine
    subroutine sluice_optimizer_prediction_init(out_prediction, struct_size) bind(c, &
      name="sluice_optimizer_prediction_init")
      import
      type(sluice_optimizer_prediction_t), intent(inout), optional :: out_prediction
      integer(c_size_t), value :: struct_size
    end subroutine
    function sluice_optimizer_predict(workload, out_prediction) bind(c, name="sluice_optimizer_predict") result(it)
      import
      type(sluice_optimizer_workload_t), intent(in), optional :: workload
      type(sluice_optimizer_prediction_t), intent(inout), optional :: out_prediction
      integer(c_int32_t) :: it
    end function
    subroutine sluice_pipeline_config_init(out_config, struct_size) bind(c, name="sluice_pipeline_config_init")
      import
      type(sluice_pipeline_config_t), intent(inout), optional :: out_config
      integer(c_size_t), value :: struct_size
    end subroutine
    function sluice_pipeline_create(config, comm, callbacks, user, out_pipeline) bind(c, name="sluice_pipeline_create") &
      result(it)
      import
      type(sluice_pipeline_config_t), intent(in), optional :: config
      type(c_ptr), value :: comm
      type(sluice_pipeline_callbacks_t), intent(in), optional :: callbacks
      type(c_ptr), value :: user
      type(c_ptr), intent(inout), optional :: out_pipeline
      integer(c_int32_t) :: it
    end function
    subroutine sluice_pipeline_destroy(pipeline) bind(c, name="sluice_pipeline_destroy")
      import
      type(c_ptr), value :: pipeline
    end subroutine
    subroutine sluice_pipeline_batch_init(out_batch, struct_size) bind(c, name="sluice_pipeline_batch_init")
      import
      type(sluice_pipeline_batch_t), intent(inout), optional :: out_batch
      integer(c_size_t), value :: struct_size
    end subroutine
    function sluice_pipeline_run_batch(pipeline, batch) bind(c, name="sluice_pipeline_run_batch") result(it)
      import
      type(c_ptr), value :: pipeline
      type(sluice_pipeline_batch_t), intent(in), optional :: batch
      integer(c_int32_t) :: it
    end function
    subroutine sluice_pipeline_abort(pipeline) bind(c, name="sluice_pipeline_abort")
      import
      type(c_ptr), value :: pipeline
    end subroutine
    function sluice_pipeline_keep(pipeline, received, out_kept) bind(c, name="sluice_pipeline_keep") result(it)
      import
      type(c_ptr), value :: pipeline
      type(sluice_stage_tensors_t), intent(in), optional :: received
      type(c_ptr), intent(inout), optional :: out_kept
      integer(c_int32_t) :: it
    end function
    subroutine sluice_pipeline_give_back(kept) bind(c, name="sluice_pipeline_give_back")
      import
      type(c_ptr), value :: kept
    end subroutine
    function sluice_pipeline_set_note(pipeline, numbers, count) bind(c, name="sluice_pipeline_set_note") result(it)
      import
      type(c_ptr), value :: pipeline
      real(c_double), intent(in), optional :: numbers
      integer(c_int32_t), value :: count
      integer(c_int32_t) :: it
    end function
    function sluice_pipeline_get_note(pipeline, rank, out_numbers, capacity, out_count) bind(c, &
      name="sluice_pipeline_get_note") result(it)
      import
      type(c_ptr), value :: pipeline
      integer(c_int32_t), value :: rank
      real(c_double), intent(inout), optional :: out_numbers
      integer(c_int32_t), value :: capacity
      integer(c_int32_t), intent(inout), optional :: out_count
      integer(c_int32_t) :: it
    end function
    function sluice_pipeline_get_stats(pipeline, out_stats) bind(c, name="sluice_pipeline_get_stats") result(it)
      import
      type(c_ptr), value :: pipeline
      type(sluice_pipeline_stats_t), intent(inout), optional :: out_stats
      integer(c_int32_t) :: it
    end function
    function sluice_pipeline_get_events(pipeline, out_events, capacity, out_count) bind(c, &
      name="sluice_pipeline_get_events") result(it)
      import
      type(c_ptr), value :: pipeline
      type(sluice_stage_event_t), intent(inout), optional :: out_events
      integer(c_int64_t), value :: capacity
      integer(c_int64_t), intent(inout), optional :: out_count
      integer(c_int32_t) :: it
    end function
    function sluice_pipeline_timeline_json(pipeline, which, text, inout_bytes) bind(c, &
      name="sluice_pipeline_timeline_json") result(it)
      import
      type(c_ptr), value :: pipeline
      integer(c_int32_t), value :: which
      character(kind=c_char), intent(inout), optional :: text(*)
      integer(c_int64_t), intent(inout), optional :: inout_bytes
      integer(c_int32_t) :: it
    end function
    subroutine sluice_layer_move_begin(role, to_lower, out_move) bind(c, name="sluice_layer_move_begin")
      import
      integer(c_int32_t), value :: role
      integer(c_int32_t), value :: to_lower
      type(sluice_layer_move_t), intent(inout), optional :: out_move
    end subroutine
    subroutine sluice_layer_move_arrived(move) bind(c, name="sluice_layer_move_arrived")
      import
      type(sluice_layer_move_t), intent(inout), optional :: move
    end subroutine
    subroutine sluice_layer_move_heard(move, word) bind(c, name="sluice_layer_move_heard")
      import
      type(sluice_layer_move_t), intent(inout), optional :: move
      integer(c_int64_t), value :: word
    end subroutine
    function sluice_layer_move_runs(move, micro_batch, word) bind(c, name="sluice_layer_move_runs") result(it)
      import
      type(sluice_layer_move_t), intent(inout), optional :: move
      integer(c_int32_t), value :: micro_batch
      integer(c_int64_t), value :: word
      integer(c_int32_t) :: it
    end function
    function sluice_layer_move_activation_word(ran) bind(c, name="sluice_layer_move_activation_word") result(it)
      import
      integer(c_int32_t), value :: ran
      integer(c_int64_t) :: it
    end function
    function sluice_layer_move_gradient_word(move) bind(c, name="sluice_layer_move_gradient_word") result(it)
      import
      type(sluice_layer_move_t), intent(in), optional :: move
      integer(c_int64_t) :: it
    end function
    subroutine sluice_layer_move_ended(move) bind(c, name="sluice_layer_move_ended")
      import
      type(sluice_layer_move_t), intent(inout), optional :: move
    end subroutine
    function sluice_layer_move_is_final(move) bind(c, name="sluice_layer_move_is_final") result(it)
      import
      type(sluice_layer_move_t), intent(in), optional :: move
      integer(c_int32_t) :: it
    end function
    function sluice_layer_move_receives(move) bind(c, name="sluice_layer_move_receives") result(it)
      import
      type(sluice_layer_move_t), intent(in), optional :: move
      integer(c_int32_t) :: it
    end function
    subroutine sluice_pipeline_workload_init(out_workload, struct_size) bind(c, name="sluice_pipeline_workload_init")
      import
      type(sluice_pipeline_workload_t), intent(inout), optional :: out_workload
      integer(c_size_t), value :: struct_size
    end subroutine
    function sluice_pipeline_predict(workload, out_prediction, out_stages) bind(c, name="sluice_pipeline_predict") &
      result(it)
      import
      type(sluice_pipeline_workload_t), intent(in), optional :: workload
      type(sluice_pipeline_prediction_t), intent(inout), optional :: out_prediction
      type(sluice_stage_prediction_t), intent(inout), optional :: out_stages
      integer(c_int32_t) :: it
    end function
    function sluice_pipeline_policy_name(index) bind(c, name="sluice_pipeline_policy_name") result(it)
      import
      integer(c_int32_t), value :: index
      type(c_ptr) :: it
    end function
    subroutine sluice_placement_problem_init(out_problem, struct_size) bind(c, name="sluice_placement_problem_init")
      import
      type(sluice_placement_problem_t), intent(inout), optional :: out_problem
      integer(c_size_t), value :: struct_size
    end subroutine
    subroutine sluice_placement_result_init(out_result, struct_size) bind(c, name="sluice_placement_result_init")
      import
      type(sluice_placement_result_t), intent(inout), optional :: out_result
      integer(c_size_t), value :: struct_size
    end subroutine
    function sluice_planner_placement(problem, inout_result) bind(c, name="sluice_planner_placement") result(it)
      import
      type(sluice_placement_problem_t), intent(in), optional :: problem
      type(sluice_placement_result_t), intent(inout), optional :: inout_result
      integer(c_int32_t) :: it
    end function
    subroutine sluice_planner_move_init(out_move, struct_size) bind(c, name="sluice_planner_move_init")
      import
      type(sluice_planner_move_t), intent(inout), optional :: out_move
      integer(c_size_t), value :: struct_size
    end subroutine
    function sluice_planner_move_verdict(move, out_verdict) bind(c, name="sluice_planner_move_verdict") result(it)
      import
      type(sluice_planner_move_t), intent(in), optional :: move
      integer(c_int32_t), intent(inout), optional :: out_verdict
      integer(c_int32_t) :: it
    end function
    subroutine sluice_plan_config_init(out_config, struct_size) bind(c, name="sluice_plan_config_init")
      import
      type(sluice_plan_config_t), intent(inout), optional :: out_config
      integer(c_size_t), value :: struct_size
    end subroutine
    function sluice_plan_create(moe, config, out_plan) bind(c, name="sluice_plan_create") result(it)
      import
      type(c_ptr), value :: moe
      type(sluice_plan_config_t), intent(in), optional :: config
      type(c_ptr), intent(inout), optional :: out_plan
      integer(c_int32_t) :: it
    end function
    subroutine sluice_plan_destroy(plan) bind(c, name="sluice_plan_destroy")
      import
      type(c_ptr), value :: plan
    end subroutine
    function sluice_plan_get_info(plan, out_info) bind(c, name="sluice_plan_get_info") result(it)
      import
      type(c_ptr), value :: plan
      type(sluice_plan_info_t), intent(inout), optional :: out_info
      integer(c_int32_t) :: it
    end function
    function sluice_plan_candidates(plan, out_candidates, capacity, out_count) bind(c, name="sluice_plan_candidates") &
      result(it)
      import
      type(c_ptr), value :: plan
      type(sluice_plan_candidate_t), intent(inout), optional :: out_candidates
      integer(c_int32_t), value :: capacity
      integer(c_int32_t), intent(inout), optional :: out_count
      integer(c_int32_t) :: it
    end function
    function sluice_plan_predict_step(plan, num_chunks, rows_per_chunk, kept_chunks, num_tokens, num_sent, out_bytes) &
      bind(c, name="sluice_plan_predict_step") result(it)
      import
      type(c_ptr), value :: plan
      integer(c_int32_t), value :: num_chunks
      integer(c_int64_t), intent(in), optional :: rows_per_chunk
      integer(c_int32_t), value :: kept_chunks
      integer(c_int64_t), value :: num_tokens
      integer(c_int64_t), value :: num_sent
      integer(c_int64_t), intent(inout), optional :: out_bytes
      integer(c_int32_t) :: it
    end function
    function sluice_moe_use_plan(moe, plan) bind(c, name="sluice_moe_use_plan") result(it)
      import
      type(c_ptr), value :: moe
      type(c_ptr), value :: plan
      integer(c_int32_t) :: it
    end function
    function sluice_moe_smallest_budget(moe, num_tokens, out_bytes) bind(c, name="sluice_moe_smallest_budget") result(it)
      import
      type(c_ptr), value :: moe
      integer(c_int64_t), value :: num_tokens
      integer(c_int64_t), intent(inout), optional :: out_bytes
      integer(c_int32_t) :: it
    end function
    function sluice_plan_write(plan, data, inout_bytes) bind(c, name="sluice_plan_write") result(it)
      import
      type(c_ptr), value :: plan
      type(c_ptr), value :: data
      integer(c_int64_t), intent(inout), optional :: inout_bytes
      integer(c_int32_t) :: it
    end function
    function sluice_plan_read(moe, data, bytes, out_plan) bind(c, name="sluice_plan_read") result(it)
      import
      type(c_ptr), value :: moe
      type(c_ptr), value :: data
      integer(c_int64_t), value :: bytes
      type(c_ptr), intent(inout), optional :: out_plan
      integer(c_int32_t) :: it
    end function
    subroutine sluice_paper_footprint(rows, model_width, hidden_width, num_experts, num_chunks, out_footprint) bind(c, &
      name="sluice_paper_footprint")
      import
      integer(c_int64_t), value :: rows
      integer(c_int64_t), value :: model_width
      integer(c_int64_t), value :: hidden_width
      integer(c_int32_t), value :: num_experts
      integer(c_int32_t), value :: num_chunks
      type(sluice_paper_footprint_t), intent(inout), optional :: out_footprint
    end subroutine
    function sluice_planner_create(machine_json, length, out_planner) bind(c, name="sluice_planner_create") result(it)
      import
      character(kind=c_char), intent(in), optional :: machine_json(*)
      integer(c_int64_t), value :: length
      type(c_ptr), intent(inout), optional :: out_planner
      integer(c_int32_t) :: it
    end function
    subroutine sluice_planner_destroy(planner) bind(c, name="sluice_planner_destroy")
      import
      type(c_ptr), value :: planner
    end subroutine
    function sluice_planner_write_machine(planner, text, inout_bytes) bind(c, name="sluice_planner_write_machine") &
      result(it)
      import
      type(c_ptr), value :: planner
      character(kind=c_char), intent(inout), optional :: text(*)
      integer(c_int64_t), intent(inout), optional :: inout_bytes
      integer(c_int32_t) :: it
    end function
    subroutine sluice_calibration_config_init(out_config, struct_size) bind(c, name="sluice_calibration_config_init")
      import
      type(sluice_calibration_config_t), intent(inout), optional :: out_config
      integer(c_size_t), value :: struct_size
    end subroutine
    function sluice_planner_calibrate(context, config, out_planner) bind(c, name="sluice_planner_calibrate") result(it)
      import
      type(c_ptr), value :: context
      type(sluice_calibration_config_t), intent(in), optional :: config
      type(c_ptr), intent(inout), optional :: out_planner
      integer(c_int32_t) :: it
    end function
    subroutine sluice_planner_workload_init(out_workload, struct_size) bind(c, name="sluice_planner_workload_init")
      import
      type(sluice_planner_workload_t), intent(inout), optional :: out_workload
      integer(c_size_t), value :: struct_size
    end subroutine
    function sluice_planner_predict(planner, workload, choice, out_prediction, out_entries, capacity) bind(c, &
      name="sluice_planner_predict") result(it)
      import
      type(c_ptr), value :: planner
      type(sluice_planner_workload_t), intent(in), optional :: workload
      type(sluice_planner_choice_t), intent(in), optional :: choice
      type(sluice_planner_prediction_t), intent(inout), optional :: out_prediction
      type(sluice_planner_entry_t), intent(inout), optional :: out_entries
      integer(c_int32_t), value :: capacity
      integer(c_int32_t) :: it
    end function
    function sluice_planner_choose(planner, workload, wanted, out_candidates, capacity, out_count, out_chosen) bind(c, &
      name="sluice_planner_choose") result(it)
      import
      type(c_ptr), value :: planner
      type(sluice_planner_workload_t), intent(in), optional :: workload
      type(sluice_planner_choice_t), intent(in), optional :: wanted
      type(sluice_planner_candidate_t), intent(inout), optional :: out_candidates
      integer(c_int32_t), value :: capacity
      integer(c_int32_t), intent(inout), optional :: out_count
      integer(c_int32_t), intent(inout), optional :: out_chosen
      integer(c_int32_t) :: it
    end function
    function sluice_planner_verdict_name(verdict) bind(c, name="sluice_planner_verdict_name") result(it)
      import
      integer(c_int32_t), value :: verdict
      type(c_ptr) :: it
    end function
    subroutine sluice_schedule_config_init(out_config, struct_size) bind(c, name="sluice_schedule_config_init")
      import
      type(sluice_schedule_config_t), intent(inout), optional :: out_config
      integer(c_size_t), value :: struct_size
    end subroutine
    function sluice_schedule_create(config, out_schedule) bind(c, name="sluice_schedule_create") result(it)
      import
      type(sluice_schedule_config_t), intent(in), optional :: config
      type(c_ptr), intent(inout), optional :: out_schedule
      integer(c_int32_t) :: it
    end function
    subroutine sluice_schedule_destroy(schedule) bind(c, name="sluice_schedule_destroy")
      import
      type(c_ptr), value :: schedule
    end subroutine
    function sluice_schedule_num_ops(schedule) bind(c, name="sluice_schedule_num_ops") result(it)
      import
      type(c_ptr), value :: schedule
      integer(c_int32_t) :: it
    end function
    function sluice_schedule_json(schedule, text, inout_bytes) bind(c, name="sluice_schedule_json") result(it)
      import
      type(c_ptr), value :: schedule
      character(kind=c_char), intent(inout), optional :: text(*)
      integer(c_int64_t), intent(inout), optional :: inout_bytes
      integer(c_int32_t) :: it
    end function
    function sluice_schedule_predict(schedule, op_seconds, share, out_begin, out_end, out_prediction) bind(c, &
      name="sluice_schedule_predict") result(it)
      import
      type(c_ptr), value :: schedule
      real(c_double), intent(in), optional :: op_seconds
      real(c_double), intent(in), optional :: share
      real(c_double), intent(inout), optional :: out_begin
      real(c_double), intent(inout), optional :: out_end
      type(sluice_schedule_prediction_t), intent(inout), optional :: out_prediction
      integer(c_int32_t) :: it
    end function
    function sluice_dispatch_forward(moe, tokens, expert_ids, stream, out_dispatch) bind(c, &
      name="sluice_dispatch_forward") result(it)
      import
      type(c_ptr), value :: moe
      type(sluice_tensor_t), intent(in), optional :: tokens
      type(sluice_tensor_t), intent(in), optional :: expert_ids
      type(c_ptr), value :: stream
      type(c_ptr), intent(inout), optional :: out_dispatch
      integer(c_int32_t) :: it
    end function
    function sluice_dispatch_rows(dispatch, out_rows, out_num_rows, out_rows_per_expert) bind(c, &
      name="sluice_dispatch_rows") result(it)
      import
      type(c_ptr), value :: dispatch
      type(c_ptr), intent(inout), optional :: out_rows
      integer(c_int64_t), intent(inout), optional :: out_num_rows
      integer(c_int64_t), intent(inout), optional :: out_rows_per_expert
      integer(c_int32_t) :: it
    end function
    function sluice_dispatch_combine(dispatch, rows, route_weights, out_tokens, stream) bind(c, &
      name="sluice_dispatch_combine") result(it)
      import
      type(c_ptr), value :: dispatch
      type(c_ptr), value :: rows
      type(sluice_tensor_t), intent(in), optional :: route_weights
      type(sluice_tensor_t), intent(in), optional :: out_tokens
      type(c_ptr), value :: stream
      integer(c_int32_t) :: it
    end function
    function sluice_dispatch_combine_backward(dispatch, rows, route_weights, grad_out, grad_rows, grad_weight_rows, &
      stream) bind(c, name="sluice_dispatch_combine_backward") result(it)
      import
      type(c_ptr), value :: dispatch
      type(c_ptr), value :: rows
      type(sluice_tensor_t), intent(in), optional :: route_weights
      type(sluice_tensor_t), intent(in), optional :: grad_out
      type(c_ptr), value :: grad_rows
      real(c_float), intent(inout), optional :: grad_weight_rows
      type(c_ptr), value :: stream
      integer(c_int32_t) :: it
    end function
    function sluice_dispatch_backward(dispatch, grad_input_rows, grad_weight_rows, grad_tokens, grad_route_weights, &
      stream) bind(c, name="sluice_dispatch_backward") result(it)
      import
      type(c_ptr), value :: dispatch
      type(c_ptr), value :: grad_input_rows
      real(c_float), intent(in), optional :: grad_weight_rows
      type(sluice_tensor_t), intent(in), optional :: grad_tokens
      type(sluice_tensor_t), intent(in), optional :: grad_route_weights
      type(c_ptr), value :: stream
      integer(c_int32_t) :: it
    end function
    subroutine sluice_dispatch_destroy(dispatch) bind(c, name="sluice_dispatch_destroy")
      import
      type(c_ptr), value :: dispatch
    end subroutine
    function sluice_route(expert_ids, num_experts, out_rows_per_expert, out_order) bind(c, name="sluice_route") result(it)
      import
      type(sluice_tensor_t), intent(in), optional :: expert_ids
      integer(c_int32_t), value :: num_experts
      integer(c_int64_t), intent(inout), optional :: out_rows_per_expert
      integer(c_int64_t), intent(inout), optional :: out_order
      integer(c_int32_t) :: it
    end function
    function sluice_experts_forward(moe, rows, rows_per_expert, params, pre, out_rows, stream) bind(c, &
      name="sluice_experts_forward") result(it)
      import
      type(c_ptr), value :: moe
      type(c_ptr), value :: rows
      integer(c_int64_t), intent(in), optional :: rows_per_expert
      type(sluice_expert_tensors_t), intent(in), optional :: params
      type(c_ptr), value :: pre
      type(c_ptr), value :: out_rows
      type(c_ptr), value :: stream
      integer(c_int32_t) :: it
    end function
    function sluice_experts_backward(moe, rows, pre, rows_per_expert, params, grad_rows, grad_input_rows, grad_params, &
      grad_mode, stream) bind(c, name="sluice_experts_backward") result(it)
      import
      type(c_ptr), value :: moe
      type(c_ptr), value :: rows
      type(c_ptr), value :: pre
      integer(c_int64_t), intent(in), optional :: rows_per_expert
      type(sluice_expert_tensors_t), intent(in), optional :: params
      type(c_ptr), value :: grad_rows
      type(c_ptr), value :: grad_input_rows
      type(sluice_expert_tensors_t), intent(in), optional :: grad_params
      integer(c_int32_t), value :: grad_mode
      type(c_ptr), value :: stream
      integer(c_int32_t) :: it
    end function
    subroutine sluice_planner_layer_init(out_layer, struct_size) bind(c, name="sluice_planner_layer_init")
      import
      type(sluice_planner_layer_t), intent(inout), optional :: out_layer
      integer(c_size_t), value :: struct_size
    end subroutine
    subroutine sluice_planner_problem_init(out_problem, struct_size) bind(c, name="sluice_planner_problem_init")
      import
      type(sluice_planner_problem_t), intent(inout), optional :: out_problem
      integer(c_size_t), value :: struct_size
    end subroutine
    subroutine sluice_planner_result_init(out_result, struct_size) bind(c, name="sluice_planner_result_init")
      import
      type(sluice_planner_result_t), intent(inout), optional :: out_result
      integer(c_size_t), value :: struct_size
    end subroutine
    function sluice_planner_stages(problem, inout_result) bind(c, name="sluice_planner_stages") result(it)
      import
      type(sluice_planner_problem_t), intent(in), optional :: problem
      type(sluice_planner_result_t), intent(inout), optional :: inout_result
      integer(c_int32_t) :: it
    end function
    subroutine sluice_tuner_config_init(out_config, struct_size) bind(c, name="sluice_tuner_config_init")
      import
      type(sluice_tuner_config_t), intent(inout), optional :: out_config
      integer(c_size_t), value :: struct_size
    end subroutine
    function sluice_context_tune(context, config) bind(c, name="sluice_context_tune") result(it)
      import
      type(c_ptr), value :: context
      type(sluice_tuner_config_t), intent(in), optional :: config
      integer(c_int32_t) :: it
    end function
    function sluice_context_decisions(context, out_decisions, capacity, out_count) bind(c, &
      name="sluice_context_decisions") result(it)
      import
      type(c_ptr), value :: context
      type(sluice_tuner_decision_t), intent(inout), optional :: out_decisions
      integer(c_int32_t), value :: capacity
      integer(c_int32_t), intent(inout), optional :: out_count
      integer(c_int32_t) :: it
    end function
    function sluice_context_decided_policies(context, out_policies, capacity, out_count) bind(c, &
      name="sluice_context_decided_policies") result(it)
      import
      type(c_ptr), value :: context
      type(sluice_tuner_policy_t), intent(inout), optional :: out_policies
      integer(c_int32_t), value :: capacity
      integer(c_int32_t), intent(inout), optional :: out_count
      integer(c_int32_t) :: it
    end function
    function sluice_context_decided_parts(context, out_kept_chunks, capacity, out_count) bind(c, &
      name="sluice_context_decided_parts") result(it)
      import
      type(c_ptr), value :: context
      integer(c_int32_t), intent(inout), optional :: out_kept_chunks
      integer(c_int32_t), value :: capacity
      integer(c_int32_t), intent(inout), optional :: out_count
      integer(c_int32_t) :: it
    end function
    function sluice_context_tuner_stats(context, out_stats) bind(c, name="sluice_context_tuner_stats") result(it)
      import
      type(c_ptr), value :: context
      type(sluice_tuner_stats_t), intent(inout), optional :: out_stats
      integer(c_int32_t) :: it
    end function
    function sluice_context_write_decisions(context, text, inout_bytes) bind(c, name="sluice_context_write_decisions") &
      result(it)
      import
      type(c_ptr), value :: context
      character(kind=c_char), intent(inout), optional :: text(*)
      integer(c_int64_t), intent(inout), optional :: inout_bytes
      integer(c_int32_t) :: it
    end function
    function sluice_context_read_decisions(context, text, length) bind(c, name="sluice_context_read_decisions") result(it)
      import
      type(c_ptr), value :: context
      character(kind=c_char), intent(in), optional :: text(*)
      integer(c_int64_t), value :: length
      integer(c_int32_t) :: it
    end function
    function sluice_context_write_machine(context, text, inout_bytes) bind(c, name="sluice_context_write_machine") &
      result(it)
      import
      type(c_ptr), value :: context
      character(kind=c_char), intent(inout), optional :: text(*)
      integer(c_int64_t), intent(inout), optional :: inout_bytes
      integer(c_int32_t) :: it
    end function
    function sluice_tuner_why_name(why) bind(c, name="sluice_tuner_why_name") result(it)
      import
      integer(c_int32_t), value :: why
      type(c_ptr) :: it
    end function
  end interface

contains

  ! Stops the program, with the library's message, unless the call has succeeded.
  subroutine sluice_check(status)
    integer(c_int32_t), intent(in) :: status
    type(sluice_error_info_t) :: why
    if (status == SLUICE_OK) return
    call sluice_error_info_init(why, c_sizeof(why))
    call sluice_error_last(why)
    print "(a, i0, 1025a)", "status ", status, ": ", why%message(1:findloc(why%message, c_null_char, dim=1) - 1)
    error stop 1
  end subroutine

  ! A tensor over 32-bit elements. data and shape have the target attribute and outlive the calls; shape is in the
  ! ABI's (row-major) order.
  type(sluice_tensor_t) function sluice_tensor(data, shape, type_code) result(it)
    type(c_ptr), intent(in) :: data
    integer(c_int64_t), intent(in), target :: shape(:)
    integer(c_int32_t), intent(in) :: type_code
    it%data = data
    it%device_type = SLUICE_DEVICE_CPU
    it%ndim = size(shape, kind=c_int32_t)
    it%type_code = int(type_code, c_int8_t)
    it%type_bits = 32_c_int8_t
    it%type_lanes = 1_c_int16_t
    it%shape = c_loc(shape)
  end function
end module
