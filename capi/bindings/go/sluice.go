// Package sluice is the C ABI of Sluice. Written by capi/bindings/generate.py: do not edit.
//
// Contracts and lifetimes are those of the headers in capi/include/sluice; names lack sluice_ and are spelled as Go
// does. Memory that the library reads through a struct belongs to C: New, Slice and Text hand it out, Free takes it
// back. A callback is the address of a C function. A handle that is an argument may be nil where the header says NULL.
//
// Where the compiler finds headers and library: CGO_CFLAGS and CGO_LDFLAGS, or an installed libsluice-dev.
// Go 1.19 or newer.
package sluice

/*
#cgo LDFLAGS: -lsluice
#include <stdlib.h>
#include <sluice/sluice.h>
*/
import "C"

import (
	"runtime"
	"unsafe"
)

const (
	VERSION_MAJOR             = 0
	VERSION_MINOR             = 1
	VERSION_PATCH             = 0
	OK                        = 0
	E_INVALID_ARGUMENT        = -1
	E_ABI                     = -2
	E_NO_MEMORY               = -3
	E_BUSY                    = -4
	E_UNSUPPORTED             = -5
	E_NOT_FOUND               = -6
	E_STATE                   = -7
	E_MISMATCH                = -8
	E_PEER_REFUSED            = -9
	E_PEER_LOST               = -10
	E_TIMED_OUT               = -11
	E_ABORTED                 = -12
	E_EXTERNAL                = -13
	E_OVER_BUDGET             = -14
	E_INTERNAL                = -15
	E_CAPACITY                = -16
	LOG_ERROR                 = 0
	LOG_WARN                  = 1
	LOG_INFO                  = 2
	LOG_DEBUG                 = 3
	TYPE_INT                  = 0
	TYPE_UINT                 = 1
	TYPE_FLOAT                = 2
	TYPE_BFLOAT               = 4
	DEVICE_CPU                = 1
	DEVICE_CUDA               = 2
	DTYPE_F32                 = 1
	DTYPE_BF16                = 2
	DTYPE_F16                 = 3
	DTYPE_F64                 = 4
	DTYPE_I32                 = 5
	DTYPE_I64                 = 6
	NCCL_ID_BYTES             = 128
	WIRE_LAYER_DTYPE          = 0
	WIRE_BF16                 = 1
	WIRE_INT8                 = 2
	LANE_COMPUTE              = 0
	LANE_COMM                 = 1
	LANE_COPY_OUT             = 2
	LANE_COPY_IN              = 3
	FORWARD                   = 0
	BACKWARD                  = 1
	SCORE_SOFTMAX             = 0
	SCORE_SIGMOID             = 1
	DROP_NONE                 = 0
	DROP_POSITION             = 1
	DROP_SCORE                = 2
	MIGRATION_NONE            = 0
	MIGRATION_STREAMS         = 1
	MIGRATION_FLUSHES         = 2
	MIGRATION_READY           = 3
	MIGRATION_AGREED          = 4
	MIGRATION_UNDECIDED       = 5
	MIGRATION_COMMITTED       = 6
	MIGRATION_ABORTED         = 7
	MIGRATION_LEAVES          = 0
	MIGRATION_ARRIVES         = 1
	MIGRATION_STILL           = 0
	MIGRATION_AT_COMMIT       = 1
	ACTIVATION_IDENTITY       = 0
	ACTIVATION_RELU           = 1
	ACTIVATION_GELU           = 2
	ACTIVATION_GELU_TANH      = 3
	ACTIVATION_SILU           = 4
	ACTIVATION_RELU2          = 5
	ACTIVATION_SWIGLU         = 6
	GATED_NO                  = 0
	GATED_HALVES              = 1
	GATED_INTERLEAVED         = 2
	WGRAD_ADAPTIVE            = -1
	WGRAD_DEFERRED            = 0
	WGRAD_PER_CHUNK           = 1
	RESTORE_ADAPTIVE          = -1
	RESTORE_KEEP              = 0
	RESTORE_OFFLOAD           = 1
	RESTORE_REDISPATCH        = 2
	RESTORE_RECOMPUTE         = 3
	RESTORE_BY_CHUNK          = 255
	CHUNKING_ADAPTIVE         = 0
	CHUNKING_TOKENS           = 1
	GROUPING_ADAPTIVE         = 0
	GROUPING_OFF              = 1
	GROUPING_ON               = 2
	EXCHANGE_EXACT            = 0
	EXCHANGE_CAPACITY         = 1
	DEDUPLICATE_NONE          = 0
	DEDUPLICATE_RANKS         = 1
	DEDUPLICATE_NODES         = 2
	DEDUPLICATE_ADAPTIVE      = 3
	SAVED_META                = 0
	SAVED_INPUT               = 1
	SAVED_PRE_ACTIVATION      = 2
	SAVED_HOST_INPUT          = 3
	SAVED_HOST_PRE_ACTIVATION = 4
	SAVED_COUNT               = 5
	GRAD_OVERWRITE            = 0
	GRAD_ACCUMULATE           = 1
	BACKWARD_DGRAD            = 1
	BACKWARD_WGRAD            = 2
	BACKWARD_BOTH             = 3
	STAGE_OUTPUT              = 0
	STAGE_INPUT_GRAD          = 1
	PIPELINE_LOOPED           = 0
	PIPELINE_V                = 1
	PIPELINE_MAX_NOTE         = 1024
	PIPELINE_MEASURED         = 0
	PIPELINE_PREDICTED        = 1
	LAYER_MOVE_UPPER          = 0
	LAYER_MOVE_LOWER          = 1
	LAYER_MOVE_RAN            = 1
	LAYER_MOVE_HAS            = 2
	MOVE_PAYS                 = 0
	MOVE_NO_GAIN              = 1
	MOVE_SMALL                = 2
	MOVE_TOO_SOON             = 3
	MOVE_COSTS_MORE           = 4
	PLANNER_CHOSEN            = 0
	PLANNER_SLOWER            = 1
	PLANNER_OVER_BUDGET       = 2
	PLANNER_EQUAL             = 3
	PLANNER_OVER_HOST_BUDGET  = 4
	WGRAD_CALL_NONE           = 0
	WGRAD_CALL_NOW            = 1
	WGRAD_CALL_LATER          = 2
	SCHEDULE_LANES            = 4
	STAGES_KEEP               = 0
	STAGES_RECOMPUTE          = 1
	STAGES_OFFLOAD            = 2
	STAGES_MIXED              = 3
	STAGES_1F1B               = 0
	STAGES_GPIPE              = 1
	STAGES_MESSAGE_DRIVEN     = 2
	STAGES_AUTO               = 0
	STAGES_EXACT              = 1
	STAGES_HEURISTIC          = 2
	STAGES_UNCOARSENED        = 3
	STAGES_FASTEST            = 0
	STAGES_FREE               = 1
	STAGES_SAVES              = 2
	STAGES_UNBURDENS          = 3
	STAGES_NO_TIME            = 4
	STAGES_OVER_BUDGET        = 5
	TUNER_ADAPTIVE            = 0
	TUNER_PROFILE             = 1
	TUNER_MODEL               = 2
	WHY_NOTHING_YET           = 0
	WHY_ON_TRIAL              = 1
	WHY_INSIDE_RANGE          = 2
	WHY_ONE_LEFT              = 3
	WHY_RACED                 = 4
	WHY_PREDICTED             = 5
	WHY_QUESTIONED            = 6
	WHY_IMPORTED              = 7
)

// Comm is a handle: only pointers to it exist.
type Comm struct {
	_ [0]byte
}

// LocalGroup is a handle: only pointers to it exist.
type LocalGroup struct {
	_ [0]byte
}

// Context is a handle: only pointers to it exist.
type Context struct {
	_ [0]byte
}

// Migration is a handle: only pointers to it exist.
type Migration struct {
	_ [0]byte
}

// Moe is a handle: only pointers to it exist.
type Moe struct {
	_ [0]byte
}

// Step is a handle: only pointers to it exist.
type Step struct {
	_ [0]byte
}

// Optimizer is a handle: only pointers to it exist.
type Optimizer struct {
	_ [0]byte
}

// OptimizerFile is a handle: only pointers to it exist.
type OptimizerFile struct {
	_ [0]byte
}

// Pipeline is a handle: only pointers to it exist.
type Pipeline struct {
	_ [0]byte
}

// Plan is a handle: only pointers to it exist.
type Plan struct {
	_ [0]byte
}

// Planner is a handle: only pointers to it exist.
type Planner struct {
	_ [0]byte
}

// Schedule is a handle: only pointers to it exist.
type Schedule struct {
	_ [0]byte
}

// Dispatch is a handle: only pointers to it exist.
type Dispatch struct {
	_ [0]byte
}

// ErrorInfo is sluice_error_info_t.
type ErrorInfo struct {
	StructSize uintptr
	Status     int32
	Rank       int32
	Peer       int32
	NativeCode int32
	Message    [1024]byte
}

// Tensor is sluice_tensor_t.
type Tensor struct {
	Data       unsafe.Pointer
	DeviceType int32
	DeviceId   int32
	Ndim       int32
	TypeCode   uint8
	TypeBits   uint8
	TypeLanes  uint16
	Shape      *int64
	Strides    *int64
	ByteOffset uint64
}

// ExtHeader is sluice_ext_header_t.
type ExtHeader struct {
	Type     int32
	Reserved int32
	Next     *ExtHeader
}

// CommConfig is sluice_comm_config_t.
type CommConfig struct {
	StructSize uintptr
	Next       *ExtHeader
	Rank       int32
	WorldSize  int32
	TimeoutNs  uint64
	WarnNs     uint64
}

// Exchange is sluice_exchange_t.
type Exchange struct {
	Send      *unsafe.Pointer
	SendBytes *uint64
	Recv      *unsafe.Pointer
	RecvBytes *uint64
}

// HostFailure is sluice_host_failure_t.
type HostFailure struct {
	Peer       int32
	NativeCode int32
	Message    [512]byte
}

// HostCommVtable is sluice_host_comm_vtable_t.
type HostCommVtable struct {
	StructSize    uintptr
	ExchangeStart unsafe.Pointer
	ExchangeWait  unsafe.Pointer
	Abort         unsafe.Pointer
	Publish       unsafe.Pointer
	Lookup        unsafe.Pointer
	Destroy       unsafe.Pointer
	IsInterrupted unsafe.Pointer
}

// NcclGroup is sluice_nccl_group_t.
type NcclGroup struct {
	StructSize uintptr
	Next       *ExtHeader
	DeviceId   int32
	Color      int32
	Id         unsafe.Pointer
	Parent     unsafe.Pointer
	Library    *byte
	StoreUser  unsafe.Pointer
	Publish    unsafe.Pointer
	Lookup     unsafe.Pointer
}

// TcpConfig is sluice_tcp_config_t.
type TcpConfig struct {
	StructSize       uintptr
	Next             *ExtHeader
	Interfaces       *byte
	ConnectTimeoutNs uint64
}

// HostGemmArgs is sluice_host_gemm_args_t.
type HostGemmArgs struct {
	M          int64
	N          int64
	K          int64
	A          unsafe.Pointer
	B          unsafe.Pointer
	C          unsafe.Pointer
	ARowStride int64
	AColStride int64
	BRowStride int64
	BColStride int64
	CRowStride int64
	CColStride int64
	DtypeAb    int32
	DtypeC     int32
	Beta       float32
	Reserved   int32
}

// ContextConfig is sluice_context_config_t.
type ContextConfig struct {
	StructSize             uintptr
	Next                   *ExtHeader
	DeviceType             int32
	DeviceId               int32
	Gemm                   *byte
	GemmLibrary            *byte
	HostGemm               unsafe.Pointer
	HostGemmUser           unsafe.Pointer
	Allocate               unsafe.Pointer
	Release                unsafe.Pointer
	AllocateUser           unsafe.Pointer
	MemoryBudget           uint64
	MaxOutstanding         int32
	SeparateWgrad          int32
	HostMemoryBudget       uint64
	SharedMemoryBudget     uint64
	SharedHostMemoryBudget uint64
	NumLayers              int32
	Reserved               int32
	RanksPerNode           int32
	WireDtype              int32
}

// ContextStats is sluice_context_stats_t.
type ContextStats struct {
	StructSize         uintptr
	CurrentBytes       uint64
	PeakBytes          uint64
	SlotBytes          uint64
	SavedBytes         uint64
	BytesSent          uint64
	NumPasses          uint64
	ComputeNs          uint64
	CommNs             uint64
	CommCpuNs          uint64
	PassNs             uint64
	LastNumChunks      int32
	LastIsSettled      int32
	Gemm               [64]byte
	NumWalks           uint64
	BindCpuNs          uint64
	WalkCpuNs          uint64
	WaitNs             uint64
	NumWakes           uint64
	WakeCpuNs          uint64
	NumReadings        uint64
	ReadingsCpuNs      uint64
	NumPoolAllocations uint64
	IdlePoolBytes      uint64
	NumFallbackChunks  uint64
	NumOutstanding     uint64
	MostOutstanding    uint64
	PlannedOutstanding uint64
}

// TraceEvent is sluice_trace_event_t.
type TraceEvent struct {
	BeginNs   uint64
	EndNs     uint64
	Op        *byte
	Layer     int32
	Chunk     int32
	Lane      int32
	Direction int32
	Bytes     uint64
}

// GateConfig is sluice_gate_config_t.
type GateConfig struct {
	StructSize     uintptr
	Next           *ExtHeader
	NumExperts     int32
	TopK           int32
	Score          int32
	Renormalize    int32
	NumGroups      int32
	TopGroups      int32
	GroupScoreTop  int32
	DropPolicy     int32
	Capacity       int64
	CapacityFactor float32
	Scaling        float32
	MinCapacity    int64
}

// MigrationConfig is sluice_migration_config_t.
type MigrationConfig struct {
	StructSize     uintptr
	Next           *ExtHeader
	Epoch          uint64
	BytesPerSecond uint64
	StagingBytes   uint64
	ChunkBytes     uint64
	GivesWay       int32
	Reserved       int32
}

// MigrationSpan is sluice_migration_span_t.
type MigrationSpan struct {
	Data     unsafe.Pointer
	Bytes    uint64
	When     int32
	Reserved int32
}

// MigrationItem is sluice_migration_item_t.
type MigrationItem struct {
	Id        uint64
	Peer      int32
	Direction int32
	Spans     *MigrationSpan
	NumSpans  int32
	Reserved  int32
}

// MigrationProgress is sluice_migration_progress_t.
type MigrationProgress struct {
	StructSize      uintptr
	Epoch           uint64
	Target          uint64
	LeavingBytes    uint64
	ArrivingBytes   uint64
	HiddenBytes     uint64
	StagedBytes     uint64
	PeakStagedBytes uint64
	CommitSeconds   float64
	Phase           int32
	Reserved        int32
}

// MoeConfig is sluice_moe_config_t.
type MoeConfig struct {
	StructSize             uintptr
	Next                   *ExtHeader
	ModelWidth             int64
	HiddenWidth            int64
	NumExperts             int32
	TopK                   int32
	Dtype                  int32
	Activation             int32
	Gated                  int32
	Bias                   int32
	NumChunks              int32
	WgradMode              int32
	CallbackExperts        int32
	LayerId                int32
	ExpertRank             *int32
	RestoreInput           int32
	RestorePreActivation   int32
	SwigluAlpha            float32
	SwigluLimit            float32
	SwigluOffset           float32
	Grouping               int32
	ExchangeMode           int32
	Chunking               int32
	CapacityRows           int64
	Deduplicate            int32
	Reuse                  int32
	RestoreInputOf         *int32
	RestorePreActivationOf *int32
	ExpertSlot             *int32
}

// ExpertPlacement is sluice_expert_placement_t.
type ExpertPlacement struct {
	StructSize uintptr
	Next       *ExtHeader
	ExpertRank *int32
	ExpertSlot *int32
	Epoch      uint64
}

// ExpertTensors is sluice_expert_tensors_t.
type ExpertTensors struct {
	StructSize uintptr
	W1         *Tensor
	W3         *Tensor
	W2         *Tensor
	B1         *Tensor
	B3         *Tensor
	B2         *Tensor
}

// ExpertCallbacks is sluice_expert_callbacks_t.
type ExpertCallbacks struct {
	StructSize uintptr
	User       unsafe.Pointer
	Forward    unsafe.Pointer
	Backward   unsafe.Pointer
}

// MoeForwardArgs is sluice_moe_forward_args_t.
type MoeForwardArgs struct {
	StructSize    uintptr
	Next          *ExtHeader
	Tokens        *Tensor
	ExpertIds     *Tensor
	RouteWeights  *Tensor
	Params        *ExpertTensors
	Callbacks     *ExpertCallbacks
	OutTokens     *Tensor
	Save          unsafe.Pointer
	SaveUser      unsafe.Pointer
	NeedsBackward int32
	LocalStatus   int32
	LocalMessage  *byte
	SaveIsCounted int32
	Repeats       int32
}

// MoeBackwardArgs is sluice_moe_backward_args_t.
type MoeBackwardArgs struct {
	StructSize       uintptr
	Next             *ExtHeader
	Tokens           *Tensor
	RouteWeights     *Tensor
	Params           *ExpertTensors
	Callbacks        *ExpertCallbacks
	GradOut          *Tensor
	GradTokens       *Tensor
	GradRouteWeights *Tensor
	GradParams       *ExpertTensors
	GradMode         int32
	Parts            int32
	ExpertReady      unsafe.Pointer
	ExpertReadyUser  unsafe.Pointer
	LocalStatus      int32
	MayReuseSaved    int32
	LocalMessage     *byte
}

// CapacityReport is sluice_capacity_report_t.
type CapacityReport struct {
	StructSize  uintptr
	NumForwards int64
	NumRoutes   int64
	NumDropped  int64
	MostRows    int64
	BadRoute    int64
	MostExpert  int32
	Reserved    int32
}

// OptimizerConfig is sluice_optimizer_config_t.
type OptimizerConfig struct {
	StructSize     uintptr
	Next           *ExtHeader
	Context        *Context
	DeviceBucket   int64
	DeviceNumSlots int32
	Reserved       int32
}

// OptimizerTensor is sluice_optimizer_tensor_t.
type OptimizerTensor struct {
	Count      int64
	Step       int64
	Param      unsafe.Pointer
	Master     *float32
	Grad       unsafe.Pointer
	ExpAvg     *float32
	ExpAvgSq   *float32
	ParamDtype int32
	GradDtype  int32
}

// OptimizerGroup is sluice_optimizer_group_t.
type OptimizerGroup struct {
	StructSize     uintptr
	Tensors        *OptimizerTensor
	NumTensors     int64
	Lr             float64
	Beta1          float64
	Beta2          float64
	Epsilon        float64
	WeightDecay    float64
	Decoupled      int32
	BiasCorrection int32
	Maximize       int32
	Reserved       int32
	Comm           *Comm
}

// OptimizerStepArgs is sluice_optimizer_step_args_t.
type OptimizerStepArgs struct {
	StructSize  uintptr
	Groups      **OptimizerGroup
	NumGroups   int64
	LossScale   float64
	MaxNorm     float64
	CheckFinite int32
	Reserved    int32
	Comm        *Comm
	Bucket      int64
	SumBuckets  int64
	File        *OptimizerFile
	Stream      unsafe.Pointer
}

// OptimizerStepResult is sluice_optimizer_step_result_t.
type OptimizerStepResult struct {
	StructSize   uintptr
	Norm         float64
	Skipped      int32
	Decided      int32
	SumBuckets   int64
	StagingBytes uint64
	SumNs        uint64
	UpdateNs     uint64
	StepNs       uint64
	ReadNs       uint64
	WriteNs      uint64
}

// OptimizerFileConfig is sluice_optimizer_file_config_t.
type OptimizerFileConfig struct {
	StructSize uintptr
	Next       *ExtHeader
	Path       *byte
	Step       int64
	Durable    int32
	Reserved   int32
	Comm       *Comm
	Rank       int32
	WorldSize  int32
	Groups     **OptimizerGroup
	NumGroups  int64
	NumDims    *int32
	Dims       *int64
	Replaces   int32
	Reserved2  int32
}

// OptimizerFileInfo is sluice_optimizer_file_info_t.
type OptimizerFileInfo struct {
	StructSize     uintptr
	Count          int64
	Step           int64
	OtherStep      int64
	UnfinishedStep int64
	Bytes          uint64
}

// OptimizerWorkload is sluice_optimizer_workload_t.
type OptimizerWorkload struct {
	StructSize   uintptr
	Next         *ExtHeader
	Count        int64
	Bucket       int64
	SumBuckets   int64
	ParamDtype   int32
	GradDtype    int32
	NumSlots     int32
	WorldSize    int32
	Decides      int32
	SumsOnDevice int32
	UpdateRate   float64
	CopyInRate   float64
	CopyOutRate  float64
	SumRate      float64
	SumSeconds   float64
}

// OptimizerPrediction is sluice_optimizer_prediction_t.
type OptimizerPrediction struct {
	StructSize     uintptr
	ParamBytes     uint64
	GradBytes      uint64
	SlotBytes      uint64
	StagingBytes   uint64
	NearBytes      uint64
	StateBytes     uint64
	FileBytes      uint64
	WholeBytes     uint64
	SumBuckets     int64
	Seconds        float64
	SecondsByK     [4]float64
	UpdateSeconds  float64
	CopyInSeconds  float64
	CopyOutSeconds float64
	SumSeconds     float64
}

// StageTensors is sluice_stage_tensors_t.
type StageTensors struct {
	Tensors    *Tensor
	NumTensors int32
	IsLocal    int32
	Word       uint64
}

// StageCall is sluice_stage_call_t.
type StageCall struct {
	StructSize   uintptr
	VirtualStage int32
	MicroBatch   int32
	IsFirst      int32
	IsLast       int32
	ForwardOnly  int32
	Reserved     int32
	Input        *StageTensors
	Output       *StageTensors
	OutputGrad   *StageTensors
}

// PipelineCallbacks is sluice_pipeline_callbacks_t.
type PipelineCallbacks struct {
	StructSize    uintptr
	Load          unsafe.Pointer
	Forward       unsafe.Pointer
	Loss          unsafe.Pointer
	Backward      unsafe.Pointer
	WeightGrad    unsafe.Pointer
	Release       unsafe.Pointer
	IsInterrupted unsafe.Pointer
	Reduce        unsafe.Pointer
}

// PipelineConfig is sluice_pipeline_config_t.
type PipelineConfig struct {
	StructSize      uintptr
	Next            *ExtHeader
	Policy          *byte
	Partition       *byte
	NumVirtual      int32
	Placement       int32
	WeightApart     int32
	ReceivesAhead   int32
	InFlight        int32
	Held            int32
	InFlightOf      *int32
	MemoryBudget    uint64
	ActivationBytes *uint64
	HeldBytes       *uint64
	NumReplicas     int32
	Replica         int32
	Stage           int32
	Reserved        int32
	HasExperts      *int32
}

// PipelineBatch is sluice_pipeline_batch_t.
type PipelineBatch struct {
	StructSize      uintptr
	NumMicroBatches int32
	ForwardOnly     int32
}

// PipelineStats is sluice_pipeline_stats_t.
type PipelineStats struct {
	StructSize       uintptr
	NumBatches       uint64
	NumFailed        uint64
	BatchNs          uint64
	CallbackNs       uint64
	WaitNs           uint64
	AgreeNs          uint64
	MessagesSent     uint64
	BytesSent        uint64
	BytesReceived    uint64
	PeakBytes        uint64
	PlannedBytes     uint64
	MostMessageBytes uint64
	InFlight         int32
	MostInFlight     int32
	MostHeld         int32
	IsChosen         int32
	Policy           *byte
}

// StageEvent is sluice_stage_event_t.
type StageEvent struct {
	BeginNs      uint64
	EndNs        uint64
	Op           *byte
	VirtualStage int32
	MicroBatch   int32
	Peer         int32
	Reserved     int32
	Bytes        uint64
}

// LayerMove is sluice_layer_move_t.
type LayerMove struct {
	Role    int32
	ToLower int32
	Has     int32
	Trigger int32
	NumOpen int32
	IsOver  int32
}

// PipelineWorkload is sluice_pipeline_workload_t.
type PipelineWorkload struct {
	StructSize      uintptr
	Next            *ExtHeader
	Policy          *byte
	NumStages       int32
	NumVirtual      int32
	NumMicroBatches int32
	Placement       int32
	WeightApart     int32
	ReceivesAhead   int32
	InFlight        int32
	Rendezvous      int32
	ForwardSeconds  *float64
	BackwardSeconds *float64
	WeightSeconds   *float64
	MessageSeconds  *float64
	ActivationBytes *uint64
	HeldBytes       *uint64
	MemoryBudget    *uint64
	SharesCards     int32
	Reserved        int32
	OpSeconds       unsafe.Pointer
	User            unsafe.Pointer
	ReduceSeconds   *float64
}

// StagePrediction is sluice_stage_prediction_t.
type StagePrediction struct {
	BusySeconds  float64
	Bubble       float64
	PlannedBytes uint64
	PeakBytes    uint64
	InFlight     int32
	MostInFlight int32
	MostHeld     int32
	Reserved     int32
}

// PipelinePrediction is sluice_pipeline_prediction_t.
type PipelinePrediction struct {
	StructSize uintptr
	Seconds    float64
	Bubble     float64
	InFlight   int32
	IsChosen   int32
	Policy     *byte
}

// PlacementProblem is sluice_placement_problem_t.
type PlacementProblem struct {
	StructSize  uintptr
	Next        *ExtHeader
	Loads       *uint64
	ExpertRank  *int32
	ExpertSlot  *int32
	ExpertBytes *uint64
	Target      float64
	NumExperts  int32
	NumRanks    int32
}

// PlacementResult is sluice_placement_result_t.
type PlacementResult struct {
	StructSize uintptr
	Next       *ExtHeader
	ExpertRank *int32
	ExpertSlot *int32
	MeanLoad   float64
	LoadBefore uint64
	Load       uint64
	BoundLoad  uint64
	MovedBytes uint64
	NumMoves   int32
	IsOptimal  int32
}

// PlannerMove is sluice_planner_move_t.
type PlannerMove struct {
	StructSize         uintptr
	Next               *ExtHeader
	StepSeconds        float64
	PlannedStepSeconds float64
	MoveSeconds        float64
	HorizonSteps       float64
	LeastGain          float64
	StepsSinceMove     int64
	LeastSteps         int64
}

// PlanConfig is sluice_plan_config_t.
type PlanConfig struct {
	StructSize             uintptr
	Next                   *ExtHeader
	MaxTokens              int64
	MemoryBudget           uint64
	BaseBytes              uint64
	MaxOutstanding         int32
	NumChunks              int32
	RestoreInput           int32
	RestorePreActivation   int32
	WgradMode              int32
	SeparateWgrad          int32
	HostMemoryBudget       uint64
	RestoreInputOf         *int32
	RestorePreActivationOf *int32
}

// PlanInfo is sluice_plan_info_t.
type PlanInfo struct {
	StructSize           uintptr
	MaxTokens            int64
	ChunkRows            int64
	KeptRows             int64
	NumBlocks            int32
	NumChunks            int32
	MaxChunks            int32
	RestoreInput         int32
	RestorePreActivation int32
	WgradMode            int32
	MaxOutstanding       int32
	KeptChunks           int32
	BaseBytes            uint64
	SlotBytes            uint64
	RoutingBytes         uint64
	ScheduleBytes        uint64
	HeaderBytes          uint64
	GemmBytes            uint64
	StepBytes            uint64
	TotalBytes           uint64
	RelativeTime         float64
	HostPoolBytes        uint64
	CommunicationBytes   uint64
	SavedBytes           uint64
	DeferredBytes        uint64
	PeakSlotBytes        uint64
	PeakDirection        int32
	PeakOp               [28]byte
}

// PlanCandidate is sluice_plan_candidate_t.
type PlanCandidate struct {
	NumChunks            int32
	RestoreInput         int32
	RestorePreActivation int32
	WgradMode            int32
	TotalBytes           uint64
	RelativeTime         float64
	Fits                 int32
	KeptChunks           int32
}

// PaperFootprint is sluice_paper_footprint_t.
type PaperFootprint struct {
	States               float64
	Activations          float64
	Temporaries          float64
	PipelinedTemporaries float64
	Saving               float64
	SavedShare           float64
}

// CalibrationConfig is sluice_calibration_config_t.
type CalibrationConfig struct {
	StructSize  uintptr
	Next        *ExtHeader
	ModelWidth  int64
	HiddenWidth int64
	Seconds     float64
	CacheDir    *byte
	Dtype       int32
	Refresh     int32
}

// PlannerWorkload is sluice_planner_workload_t.
type PlannerWorkload struct {
	StructSize             uintptr
	Next                   *ExtHeader
	ModelWidth             int64
	HiddenWidth            int64
	NumTokens              int64
	MemoryBudget           uint64
	Skew                   float64
	NumExperts             int32
	TopK                   int32
	WorldSize              int32
	Dtype                  int32
	Gated                  int32
	CallbackExperts        int32
	MaxOutstanding         int32
	Reserved               int32
	HostMemoryBudget       uint64
	Deduplicate            int32
	Chunking               int32
	RestoreInputOf         *int32
	RestorePreActivationOf *int32
	KeptChunks             int32
	MayKeepPart            int32
	Activation             int32
	Grouped                int32
}

// PlannerChoice is sluice_planner_choice_t.
type PlannerChoice struct {
	NumChunks            int32
	RestoreInput         int32
	RestorePreActivation int32
	WgradMode            int32
}

// PlannerPrediction is sluice_planner_prediction_t.
type PlannerPrediction struct {
	StructSize              uintptr
	ForwardSeconds          float64
	BackwardSeconds         float64
	ForwardBusy             [4]float64
	BackwardBusy            [4]float64
	OverheadSeconds         float64
	MpmoeForwardSeconds     float64
	MpmoeBackwardSeconds    float64
	MpipemoeForwardSeconds  float64
	MpipemoeBackwardSeconds float64
	MachineErrorMedian      float64
	MachineErrorP90         float64
	ChunkRows               int64
	BaseBytes               uint64
	SlotBytes               uint64
	RoutingBytes            uint64
	ScheduleBytes           uint64
	HeaderBytes             uint64
	GemmBytes               uint64
	StepBytes               uint64
	TotalBytes              uint64
	Fits                    int32
	NumEntries              int32
	MaxChunks               int32
	RunChunks               int32
	SentRows                float64
	KeptChunks              int32
	Reserved                int32
}

// PlannerEntry is sluice_planner_entry_t.
type PlannerEntry struct {
	BeginSeconds float64
	EndSeconds   float64
	Op           *byte
	Direction    int32
	Lane         int32
	Chunk        int32
	Index        int32
}

// PlannerCandidate is sluice_planner_candidate_t.
type PlannerCandidate struct {
	Choice          PlannerChoice
	Verdict         int32
	KeptChunks      int32
	ForwardSeconds  float64
	BackwardSeconds float64
	SlowerBy        float64
	TotalBytes      uint64
	BytesOver       uint64
}

// ScheduleConfig is sluice_schedule_config_t.
type ScheduleConfig struct {
	StructSize             uintptr
	Next                   *ExtHeader
	Direction              int32
	NumChunks              int32
	SingleRank             int32
	NeedsBackward          int32
	CallbackExperts        int32
	Gated                  int32
	Dgrad                  int32
	Wgrad                  int32
	WgradMode              int32
	MayReuseSaved          int32
	UnderPlan              int32
	RestoreInput           int32
	RestorePreActivation   int32
	Grouped                int32
	RestoreInputOf         *int32
	RestorePreActivationOf *int32
	Deduplicate            int32
	ChunksByExperts        int32
}

// SchedulePrediction is sluice_schedule_prediction_t.
type SchedulePrediction struct {
	StructSize  uintptr
	Seconds     float64
	BusySeconds [4]float64
}

// StagesOption is sluice_stages_option_t.
type StagesOption struct {
	ForwardSeconds  float64
	BackwardSeconds float64
	ResidentBytes   uint64
	HeldBytes       uint64
	CopiedBytes     uint64
	WorkingBytes    uint64
	ArenaBytes      uint64
	Kind            int32
	Tag             int32
}

// StagesEdge is sluice_stages_edge_t.
type StagesEdge struct {
	From int32
	To   int32
}

// StagesLink is sluice_stages_link_t.
type StagesLink struct {
	BytesPerSecond float64
	LatencySeconds float64
	FullDuplex     int32
	Reserved       int32
}

// PlannerLayer is sluice_planner_layer_t.
type PlannerLayer struct {
	StructSize       uintptr
	Next             *ExtHeader
	ForwardSeconds   float64
	BackwardSeconds  float64
	RecomputeSeconds float64
	ActivationBytes  uint64
	CheckpointBytes  uint64
	WorkspaceBytes   uint64
	ParameterBytes   uint64
	StateBytes       uint64
	OutputBytes      uint64
	Planner          *Planner
	Moe              *PlannerWorkload
	Wanted           *PlannerChoice
	Options          *StagesOption
	NumOptions       int32
	MayRecompute     int32
	MayOffload       int32
	Reserved         int32
}

// PlannerProblem is sluice_planner_problem_t.
type PlannerProblem struct {
	StructSize         uintptr
	Next               *ExtHeader
	Layers             **PlannerLayer
	Edges              *StagesEdge
	Links              *StagesLink
	BudgetBytes        *uint64
	InFlight           *int32
	BaseBytes          uint64
	CopyBytesPerSecond float64
	NumLayers          int32
	NumEdges           int32
	NumStages          int32
	NumMicroBatches    int32
	Schedule           int32
	InFlightLimit      int32
	WeightVersions     int32
	CopiesShareLinks   int32
	Method             int32
	Reserved           int32
}

// StagesChoice is sluice_stages_choice_t.
type StagesChoice struct {
	Stage         int32
	Kind          int32
	Option        int32
	Fastest       int32
	Reason        int32
	Reserved      int32
	ReasonBytes   uint64
	ReasonSeconds float64
}

// StagesOtherCut is sluice_stages_other_cut_t.
type StagesOtherCut struct {
	SlowestSeconds float64
	ShortBytes     uint64
	Layer          int32
	Reserved       int32
}

// StagesStage is sluice_stages_stage_t.
type StagesStage struct {
	Seconds        float64
	ComputeSeconds float64
	ExtraSeconds   float64
	MessageSeconds float64
	CopySeconds    float64
	Bytes          uint64
	BaseBytes      uint64
	ParameterBytes uint64
	StateBytes     uint64
	MessageBytes   uint64
	ResidentBytes  uint64
	HeldBytes      uint64
	WorkingBytes   uint64
	StagingBytes   uint64
	ArenaBytes     uint64
	HostBytes      uint64
	PeakBytes      uint64
	BudgetBytes    uint64
	InFlight       int32
	NumLayers      int32
	BeginsEarlier  StagesOtherCut
	BeginsLater    StagesOtherCut
}

// PlannerResult is sluice_planner_result_t.
type PlannerResult struct {
	StructSize          uintptr
	Next                *ExtHeader
	Choices             *StagesChoice
	Stages              *StagesStage
	Moe                 *PlannerCandidate
	Text                *byte
	TextRoom            uint64
	TextBytes           uint64
	SlowestSeconds      float64
	StepSeconds         float64
	SmallestBudgetBytes uint64
	ShortBytes          uint64
	SlowestStage        int32
	BlockingStage       int32
	IsOptimal           int32
	NumRounds           int32
}

// TunerConfig is sluice_tuner_config_t.
type TunerConfig struct {
	StructSize uintptr
	Next       *ExtHeader
	Mode       int32
	Reserved   int32
	Machine    *Planner
}

// TunerDecision is sluice_tuner_decision_t.
type TunerDecision struct {
	ModelWidth        int64
	HiddenWidth       int64
	NumExperts        int32
	TopK              int32
	Dtype             int32
	Gated             int32
	Rows              int64
	NumChunks         int32
	WgradMode         int32
	Why               int32
	NumRaced          int32
	RacePasses        int64
	Seconds           float64
	PredictedSeconds  float64
	RunnerUpSeconds   float64
	RunnerUpChunks    int32
	RunnerUpWgradMode int32
}

// TunerPolicy is sluice_tuner_policy_t.
type TunerPolicy struct {
	RestoreInput                 int32
	RestorePreActivation         int32
	RunnerUpRestoreInput         int32
	RunnerUpRestorePreActivation int32
	MemoryBudget                 uint64
	TotalBytes                   uint64
}

// TunerStats is sluice_tuner_stats_t.
type TunerStats struct {
	StructSize    uintptr
	TimedPasses   int64
	RacePasses    int64
	NumDecisions  int64
	NumSwitches   int64
	NumQuestioned int64
	NumChanged    int64
	Monotonic     int64
	NotMonotonic  int64
	TotalSeconds  float64
	ExcessSeconds float64
	SwitchSeconds float64
	OneValley     int64
	NotOneValley  int64
}

func ErrorInfoInit(outInfo *ErrorInfo, structSize uintptr) {
	C.sluice_error_info_init((*C.sluice_error_info_t)(unsafe.Pointer(outInfo)), C.size_t(structSize))
}

func ErrorLast(outInfo *ErrorInfo) {
	C.sluice_error_last((*C.sluice_error_info_t)(unsafe.Pointer(outInfo)))
}

func StatusName(status int32) string {
	return C.GoString(C.sluice_status_name(C.sluice_status_t(status)))
}

func Version(outMajor *int32, outMinor *int32, outPatch *int32) {
	C.sluice_version((*C.int32_t)(unsafe.Pointer(outMajor)), (*C.int32_t)(unsafe.Pointer(outMinor)), (*C.int32_t)(unsafe.Pointer(outPatch)))
}

func BuildInfo() string {
	return C.GoString(C.sluice_build_info())
}

func SetLog(fn unsafe.Pointer, user unsafe.Pointer, maxLevel int32) {
	C.sluice_set_log(C.sluice_log_fn_t(fn), user, C.int32_t(maxLevel))
}

func CommConfigInit(outConfig *CommConfig, structSize uintptr) {
	C.sluice_comm_config_init((*C.sluice_comm_config_t)(unsafe.Pointer(outConfig)), C.size_t(structSize))
}

func LocalGroupCreate(worldSize int32, outGroup **LocalGroup) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_local_group_create(C.int32_t(worldSize), (**C.sluice_local_group_t)(unsafe.Pointer(outGroup)))
	})
}

func LocalGroupDestroy(group *LocalGroup) {
	C.sluice_local_group_destroy((*C.sluice_local_group_t)(unsafe.Pointer(group)))
}

func CommCreateLocal(group *LocalGroup, config *CommConfig, outComm **Comm) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_comm_create_local((*C.sluice_local_group_t)(unsafe.Pointer(group)), (*C.sluice_comm_config_t)(unsafe.Pointer(config)), (**C.sluice_comm_t)(unsafe.Pointer(outComm)))
	})
}

func CommCreateHost(config *CommConfig, vtable *HostCommVtable, user unsafe.Pointer, outComm **Comm) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_comm_create_host((*C.sluice_comm_config_t)(unsafe.Pointer(config)), (*C.sluice_host_comm_vtable_t)(unsafe.Pointer(vtable)), user, (**C.sluice_comm_t)(unsafe.Pointer(outComm)))
	})
}

func CommCreateMpi(config *CommConfig, mpiCommF int64, library *byte, outComm **Comm) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_comm_create_mpi((*C.sluice_comm_config_t)(unsafe.Pointer(config)), C.int64_t(mpiCommF), (*C.char)(unsafe.Pointer(library)), (**C.sluice_comm_t)(unsafe.Pointer(outComm)))
	})
}

func NcclGroupInit(outGroup *NcclGroup, structSize uintptr) {
	C.sluice_nccl_group_init((*C.sluice_nccl_group_t)(unsafe.Pointer(outGroup)), C.size_t(structSize))
}

func NcclIdCreate(library *byte, outId unsafe.Pointer) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_nccl_id_create((*C.char)(unsafe.Pointer(library)), outId)
	})
}

func CommCreateNccl(config *CommConfig, group *NcclGroup, outComm **Comm) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_comm_create_nccl((*C.sluice_comm_config_t)(unsafe.Pointer(config)), (*C.sluice_nccl_group_t)(unsafe.Pointer(group)), (**C.sluice_comm_t)(unsafe.Pointer(outComm)))
	})
}

func TcpConfigInit(outConfig *TcpConfig, structSize uintptr) {
	C.sluice_tcp_config_init((*C.sluice_tcp_config_t)(unsafe.Pointer(outConfig)), C.size_t(structSize))
}

func CommCreateTcp(parent *Comm, config *TcpConfig, outComm **Comm) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_comm_create_tcp((*C.sluice_comm_t)(unsafe.Pointer(parent)), (*C.sluice_tcp_config_t)(unsafe.Pointer(config)), (**C.sluice_comm_t)(unsafe.Pointer(outComm)))
	})
}

func CommRank(comm *Comm) int32 {
	return int32(C.sluice_comm_rank((*C.sluice_comm_t)(unsafe.Pointer(comm))))
}

func CommWorldSize(comm *Comm) int32 {
	return int32(C.sluice_comm_world_size((*C.sluice_comm_t)(unsafe.Pointer(comm))))
}

func CommName(comm *Comm) string {
	return C.GoString(C.sluice_comm_name((*C.sluice_comm_t)(unsafe.Pointer(comm))))
}

func CommAbort(comm *Comm) {
	C.sluice_comm_abort((*C.sluice_comm_t)(unsafe.Pointer(comm)))
}

func CommDestroy(comm *Comm) {
	C.sluice_comm_destroy((*C.sluice_comm_t)(unsafe.Pointer(comm)))
}

func ContextConfigInit(outConfig *ContextConfig, structSize uintptr) {
	C.sluice_context_config_init((*C.sluice_context_config_t)(unsafe.Pointer(outConfig)), C.size_t(structSize))
}

func ContextCreate(config *ContextConfig, comm *Comm, outContext **Context) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_context_create((*C.sluice_context_config_t)(unsafe.Pointer(config)), (*C.sluice_comm_t)(unsafe.Pointer(comm)), (**C.sluice_context_t)(unsafe.Pointer(outContext)))
	})
}

func ContextDestroy(context *Context) {
	C.sluice_context_destroy((*C.sluice_context_t)(unsafe.Pointer(context)))
}

func ContextSetShare(context *Context, memoryBudget uint64, whole uint64) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_context_set_share((*C.sluice_context_t)(unsafe.Pointer(context)), C.uint64_t(memoryBudget), C.uint64_t(whole))
	})
}

func ContextAllocateSaved(context *Context, which int32, bytes uint64, outData *unsafe.Pointer) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_context_allocate_saved((*C.sluice_context_t)(unsafe.Pointer(context)), C.int32_t(which), C.uint64_t(bytes), (*unsafe.Pointer)(unsafe.Pointer(outData)))
	})
}

func ContextAllocate(context *Context, bytes uint64, outData *unsafe.Pointer) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_context_allocate((*C.sluice_context_t)(unsafe.Pointer(context)), C.uint64_t(bytes), (*unsafe.Pointer)(unsafe.Pointer(outData)))
	})
}

func ContextFree(context *Context, data unsafe.Pointer, bytes uint64) {
	C.sluice_context_free((*C.sluice_context_t)(unsafe.Pointer(context)), data, C.uint64_t(bytes))
}

func ContextGetStats(context *Context, resetPeak int32, outStats *ContextStats) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_context_get_stats((*C.sluice_context_t)(unsafe.Pointer(context)), C.int32_t(resetPeak), (*C.sluice_context_stats_t)(unsafe.Pointer(outStats)))
	})
}

func ContextTrace(context *Context, capacity int64) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_context_trace((*C.sluice_context_t)(unsafe.Pointer(context)), C.int64_t(capacity))
	})
}

func ContextTakeTrace(context *Context, outEvents *TraceEvent, capacity int64, outCount *int64) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_context_take_trace((*C.sluice_context_t)(unsafe.Pointer(context)), (*C.sluice_trace_event_t)(unsafe.Pointer(outEvents)), C.int64_t(capacity), (*C.int64_t)(unsafe.Pointer(outCount)))
	})
}

func GateConfigInit(outConfig *GateConfig, structSize uintptr) {
	C.sluice_gate_config_init((*C.sluice_gate_config_t)(unsafe.Pointer(outConfig)), C.size_t(structSize))
}

func GateForward(config *GateConfig, logits *Tensor, bias *Tensor, expertIds *Tensor, routeWeights *Tensor, counts *Tensor, outAuxLoss *float32, outZLoss *float32) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_gate_forward((*C.sluice_gate_config_t)(unsafe.Pointer(config)), (*C.sluice_tensor_t)(unsafe.Pointer(logits)), (*C.sluice_tensor_t)(unsafe.Pointer(bias)), (*C.sluice_tensor_t)(unsafe.Pointer(expertIds)), (*C.sluice_tensor_t)(unsafe.Pointer(routeWeights)), (*C.sluice_tensor_t)(unsafe.Pointer(counts)), (*C.float)(unsafe.Pointer(outAuxLoss)), (*C.float)(unsafe.Pointer(outZLoss)))
	})
}

func GateBackward(config *GateConfig, logits *Tensor, bias *Tensor, expertIds *Tensor, gradRouteWeights *Tensor, gradAuxLoss float32, gradZLoss float32, gradLogits *Tensor) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_gate_backward((*C.sluice_gate_config_t)(unsafe.Pointer(config)), (*C.sluice_tensor_t)(unsafe.Pointer(logits)), (*C.sluice_tensor_t)(unsafe.Pointer(bias)), (*C.sluice_tensor_t)(unsafe.Pointer(expertIds)), (*C.sluice_tensor_t)(unsafe.Pointer(gradRouteWeights)), C.float(gradAuxLoss), C.float(gradZLoss), (*C.sluice_tensor_t)(unsafe.Pointer(gradLogits)))
	})
}

func MigrationConfigInit(outConfig *MigrationConfig, structSize uintptr) {
	C.sluice_migration_config_init((*C.sluice_migration_config_t)(unsafe.Pointer(outConfig)), C.size_t(structSize))
}

func MigrationCreate(comm *Comm, config *MigrationConfig, outMigration **Migration) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_migration_create((*C.sluice_comm_t)(unsafe.Pointer(comm)), (*C.sluice_migration_config_t)(unsafe.Pointer(config)), (**C.sluice_migration_t)(unsafe.Pointer(outMigration)))
	})
}

func MigrationDestroy(migration *Migration) {
	C.sluice_migration_destroy((*C.sluice_migration_t)(unsafe.Pointer(migration)))
}

func MigrationBegin(migration *Migration, epoch uint64, items *MigrationItem, numItems int32) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_migration_begin((*C.sluice_migration_t)(unsafe.Pointer(migration)), C.uint64_t(epoch), (*C.sluice_migration_item_t)(unsafe.Pointer(items)), C.int32_t(numItems))
	})
}

func MigrationReadEarly(migration *Migration, id uint64, peer int32, to *MigrationSpan, numSpans int32, outIsThere *int32) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_migration_read_early((*C.sluice_migration_t)(unsafe.Pointer(migration)), C.uint64_t(id), C.int32_t(peer), (*C.sluice_migration_span_t)(unsafe.Pointer(to)), C.int32_t(numSpans), (*C.int32_t)(unsafe.Pointer(outIsThere)))
	})
}

func MigrationMarkStill(migration *Migration, id uint64, peer int32) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_migration_mark_still((*C.sluice_migration_t)(unsafe.Pointer(migration)), C.uint64_t(id), C.int32_t(peer))
	})
}

func MigrationCommit(migration *Migration, refusal *byte) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_migration_commit((*C.sluice_migration_t)(unsafe.Pointer(migration)), (*C.char)(unsafe.Pointer(refusal)))
	})
}

func MigrationSettle(migration *Migration, comm *Comm, outEpoch *uint64) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_migration_settle((*C.sluice_migration_t)(unsafe.Pointer(migration)), (*C.sluice_comm_t)(unsafe.Pointer(comm)), (*C.uint64_t)(unsafe.Pointer(outEpoch)))
	})
}

func MigrationAbort(migration *Migration, reason *byte) {
	C.sluice_migration_abort((*C.sluice_migration_t)(unsafe.Pointer(migration)), (*C.char)(unsafe.Pointer(reason)))
}

func MigrationGetProgress(migration *Migration, outProgress *MigrationProgress) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_migration_get_progress((*C.sluice_migration_t)(unsafe.Pointer(migration)), (*C.sluice_migration_progress_t)(unsafe.Pointer(outProgress)))
	})
}

func MigrationPhaseName(phase int32) string {
	return C.GoString(C.sluice_migration_phase_name(C.int32_t(phase)))
}

func RestorePoliciesJson(text_ *byte, inoutBytes *uint64) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_restore_policies_json((*C.char)(unsafe.Pointer(text_)), (*C.uint64_t)(unsafe.Pointer(inoutBytes)))
	})
}

func MoeConfigInit(outConfig *MoeConfig, structSize uintptr) {
	C.sluice_moe_config_init((*C.sluice_moe_config_t)(unsafe.Pointer(outConfig)), C.size_t(structSize))
}

func MoeCreate(context *Context, config *MoeConfig, outMoe **Moe) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_moe_create((*C.sluice_context_t)(unsafe.Pointer(context)), (*C.sluice_moe_config_t)(unsafe.Pointer(config)), (**C.sluice_moe_t)(unsafe.Pointer(outMoe)))
	})
}

func MoeDestroy(moe *Moe) {
	C.sluice_moe_destroy((*C.sluice_moe_t)(unsafe.Pointer(moe)))
}

func MoeNumLocalExperts(moe *Moe) int32 {
	return int32(C.sluice_moe_num_local_experts((*C.sluice_moe_t)(unsafe.Pointer(moe))))
}

func ExpertPlacementInit(outPlacement *ExpertPlacement, structSize uintptr) {
	C.sluice_expert_placement_init((*C.sluice_expert_placement_t)(unsafe.Pointer(outPlacement)), C.size_t(structSize))
}

func MoeReplaceExperts(moe *Moe, placement *ExpertPlacement) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_moe_replace_experts((*C.sluice_moe_t)(unsafe.Pointer(moe)), (*C.sluice_expert_placement_t)(unsafe.Pointer(placement)))
	})
}

func MoeGetPlacement(moe *Moe, outExpertRank *int32, outExpertSlot *int32, outEpoch *uint64) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_moe_get_placement((*C.sluice_moe_t)(unsafe.Pointer(moe)), (*C.int32_t)(unsafe.Pointer(outExpertRank)), (*C.int32_t)(unsafe.Pointer(outExpertSlot)), (*C.uint64_t)(unsafe.Pointer(outEpoch)))
	})
}

func MoeGetLoads(moe *Moe, outExpertRows *int64, outRankRows *int64, outNumForwards *int64) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_moe_get_loads((*C.sluice_moe_t)(unsafe.Pointer(moe)), (*C.int64_t)(unsafe.Pointer(outExpertRows)), (*C.int64_t)(unsafe.Pointer(outRankRows)), (*C.int64_t)(unsafe.Pointer(outNumForwards)))
	})
}

func MoeForwardArgsInit(outArgs *MoeForwardArgs, structSize uintptr) {
	C.sluice_moe_forward_args_init((*C.sluice_moe_forward_args_t)(unsafe.Pointer(outArgs)), C.size_t(structSize))
}

func MoeForward(moe *Moe, args *MoeForwardArgs, stream unsafe.Pointer, outStep **Step) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_moe_forward((*C.sluice_moe_t)(unsafe.Pointer(moe)), (*C.sluice_moe_forward_args_t)(unsafe.Pointer(args)), C.sluice_stream_t(stream), (**C.sluice_step_t)(unsafe.Pointer(outStep)))
	})
}

func StepDrop(step *Step) {
	C.sluice_step_drop((*C.sluice_step_t)(unsafe.Pointer(step)))
}

func StepRestore(moe *Moe, saved *unsafe.Pointer, savedBytes *uint64, outStep **Step) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_step_restore((*C.sluice_moe_t)(unsafe.Pointer(moe)), (*unsafe.Pointer)(unsafe.Pointer(saved)), (*C.uint64_t)(unsafe.Pointer(savedBytes)), (**C.sluice_step_t)(unsafe.Pointer(outStep)))
	})
}

func StepInfo(step *Step, outNumChunks *int32, outRowsPerExpert *int64) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_step_info((*C.sluice_step_t)(unsafe.Pointer(step)), (*C.int32_t)(unsafe.Pointer(outNumChunks)), (*C.int64_t)(unsafe.Pointer(outRowsPerExpert)))
	})
}

func MoeBackwardArgsInit(outArgs *MoeBackwardArgs, structSize uintptr) {
	C.sluice_moe_backward_args_init((*C.sluice_moe_backward_args_t)(unsafe.Pointer(outArgs)), C.size_t(structSize))
}

func MoeBackward(moe *Moe, step *Step, args *MoeBackwardArgs, stream unsafe.Pointer) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_moe_backward((*C.sluice_moe_t)(unsafe.Pointer(moe)), (*C.sluice_step_t)(unsafe.Pointer(step)), (*C.sluice_moe_backward_args_t)(unsafe.Pointer(args)), C.sluice_stream_t(stream))
	})
}

func CapacityReportInit(outReport *CapacityReport, structSize uintptr) {
	C.sluice_capacity_report_init((*C.sluice_capacity_report_t)(unsafe.Pointer(outReport)), C.size_t(structSize))
}

func MoeTakeCapacityReport(moe *Moe, stream unsafe.Pointer, outReport *CapacityReport) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_moe_take_capacity_report((*C.sluice_moe_t)(unsafe.Pointer(moe)), C.sluice_stream_t(stream), (*C.sluice_capacity_report_t)(unsafe.Pointer(outReport)))
	})
}

func OptimizerConfigInit(outConfig *OptimizerConfig, structSize uintptr) {
	C.sluice_optimizer_config_init((*C.sluice_optimizer_config_t)(unsafe.Pointer(outConfig)), C.size_t(structSize))
}

func OptimizerGroupInit(outGroup *OptimizerGroup, structSize uintptr) {
	C.sluice_optimizer_group_init((*C.sluice_optimizer_group_t)(unsafe.Pointer(outGroup)), C.size_t(structSize))
}

func OptimizerStepArgsInit(outArgs *OptimizerStepArgs, structSize uintptr) {
	C.sluice_optimizer_step_args_init((*C.sluice_optimizer_step_args_t)(unsafe.Pointer(outArgs)), C.size_t(structSize))
}

func OptimizerStepResultInit(outResult *OptimizerStepResult, structSize uintptr) {
	C.sluice_optimizer_step_result_init((*C.sluice_optimizer_step_result_t)(unsafe.Pointer(outResult)), C.size_t(structSize))
}

func OptimizerCreate(config *OptimizerConfig, outOptimizer **Optimizer) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_optimizer_create((*C.sluice_optimizer_config_t)(unsafe.Pointer(config)), (**C.sluice_optimizer_t)(unsafe.Pointer(outOptimizer)))
	})
}

func OptimizerStep(optimizer *Optimizer, args *OptimizerStepArgs, outResult *OptimizerStepResult) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_optimizer_step((*C.sluice_optimizer_t)(unsafe.Pointer(optimizer)), (*C.sluice_optimizer_step_args_t)(unsafe.Pointer(args)), (*C.sluice_optimizer_step_result_t)(unsafe.Pointer(outResult)))
	})
}

func OptimizerDestroy(optimizer *Optimizer) {
	C.sluice_optimizer_destroy((*C.sluice_optimizer_t)(unsafe.Pointer(optimizer)))
}

func OptimizerFileConfigInit(outConfig *OptimizerFileConfig, structSize uintptr) {
	C.sluice_optimizer_file_config_init((*C.sluice_optimizer_file_config_t)(unsafe.Pointer(outConfig)), C.size_t(structSize))
}

func OptimizerFileCreate(config *OptimizerFileConfig, groups **OptimizerGroup, numGroups int64, outFile **OptimizerFile) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_optimizer_file_create((*C.sluice_optimizer_file_config_t)(unsafe.Pointer(config)), (**C.sluice_optimizer_group_t)(unsafe.Pointer(groups)), C.int64_t(numGroups), (**C.sluice_optimizer_file_t)(unsafe.Pointer(outFile)))
	})
}

func OptimizerFileOpen(config *OptimizerFileConfig, outFile **OptimizerFile) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_optimizer_file_open((*C.sluice_optimizer_file_config_t)(unsafe.Pointer(config)), (**C.sluice_optimizer_file_t)(unsafe.Pointer(outFile)))
	})
}

func OptimizerFileLoad(file *OptimizerFile, groups **OptimizerGroup, numGroups int64) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_optimizer_file_load((*C.sluice_optimizer_file_t)(unsafe.Pointer(file)), (**C.sluice_optimizer_group_t)(unsafe.Pointer(groups)), C.int64_t(numGroups))
	})
}

func OptimizerFileInfoInit(outInfo *OptimizerFileInfo, structSize uintptr) {
	C.sluice_optimizer_file_info_init((*C.sluice_optimizer_file_info_t)(unsafe.Pointer(outInfo)), C.size_t(structSize))
}

func GetOptimizerFileInfo(file *OptimizerFile, outInfo *OptimizerFileInfo) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_optimizer_file_info((*C.sluice_optimizer_file_t)(unsafe.Pointer(file)), (*C.sluice_optimizer_file_info_t)(unsafe.Pointer(outInfo)))
	})
}

func OptimizerFileClose(file *OptimizerFile) {
	C.sluice_optimizer_file_close((*C.sluice_optimizer_file_t)(unsafe.Pointer(file)))
}

func OptimizerWorkloadInit(outWorkload *OptimizerWorkload, structSize uintptr) {
	C.sluice_optimizer_workload_init((*C.sluice_optimizer_workload_t)(unsafe.Pointer(outWorkload)), C.size_t(structSize))
}

func OptimizerPredictionInit(outPrediction *OptimizerPrediction, structSize uintptr) {
	C.sluice_optimizer_prediction_init((*C.sluice_optimizer_prediction_t)(unsafe.Pointer(outPrediction)), C.size_t(structSize))
}

func OptimizerPredict(workload *OptimizerWorkload, outPrediction *OptimizerPrediction) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_optimizer_predict((*C.sluice_optimizer_workload_t)(unsafe.Pointer(workload)), (*C.sluice_optimizer_prediction_t)(unsafe.Pointer(outPrediction)))
	})
}

func PipelineConfigInit(outConfig *PipelineConfig, structSize uintptr) {
	C.sluice_pipeline_config_init((*C.sluice_pipeline_config_t)(unsafe.Pointer(outConfig)), C.size_t(structSize))
}

func PipelineCreate(config *PipelineConfig, comm *Comm, callbacks *PipelineCallbacks, user unsafe.Pointer, outPipeline **Pipeline) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_pipeline_create((*C.sluice_pipeline_config_t)(unsafe.Pointer(config)), (*C.sluice_comm_t)(unsafe.Pointer(comm)), (*C.sluice_pipeline_callbacks_t)(unsafe.Pointer(callbacks)), user, (**C.sluice_pipeline_t)(unsafe.Pointer(outPipeline)))
	})
}

func PipelineDestroy(pipeline *Pipeline) {
	C.sluice_pipeline_destroy((*C.sluice_pipeline_t)(unsafe.Pointer(pipeline)))
}

func PipelineBatchInit(outBatch *PipelineBatch, structSize uintptr) {
	C.sluice_pipeline_batch_init((*C.sluice_pipeline_batch_t)(unsafe.Pointer(outBatch)), C.size_t(structSize))
}

func PipelineRunBatch(pipeline *Pipeline, batch *PipelineBatch) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_pipeline_run_batch((*C.sluice_pipeline_t)(unsafe.Pointer(pipeline)), (*C.sluice_pipeline_batch_t)(unsafe.Pointer(batch)))
	})
}

func PipelineAbort(pipeline *Pipeline) {
	C.sluice_pipeline_abort((*C.sluice_pipeline_t)(unsafe.Pointer(pipeline)))
}

func PipelineKeep(pipeline *Pipeline, received *StageTensors, outKept *unsafe.Pointer) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_pipeline_keep((*C.sluice_pipeline_t)(unsafe.Pointer(pipeline)), (*C.sluice_stage_tensors_t)(unsafe.Pointer(received)), (*unsafe.Pointer)(unsafe.Pointer(outKept)))
	})
}

func PipelineGiveBack(kept unsafe.Pointer) {
	C.sluice_pipeline_give_back(kept)
}

func PipelineSetNote(pipeline *Pipeline, numbers *float64, count int32) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_pipeline_set_note((*C.sluice_pipeline_t)(unsafe.Pointer(pipeline)), (*C.double)(unsafe.Pointer(numbers)), C.int32_t(count))
	})
}

func PipelineGetNote(pipeline *Pipeline, rank int32, outNumbers *float64, capacity int32, outCount *int32) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_pipeline_get_note((*C.sluice_pipeline_t)(unsafe.Pointer(pipeline)), C.int32_t(rank), (*C.double)(unsafe.Pointer(outNumbers)), C.int32_t(capacity), (*C.int32_t)(unsafe.Pointer(outCount)))
	})
}

func PipelineGetStats(pipeline *Pipeline, outStats *PipelineStats) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_pipeline_get_stats((*C.sluice_pipeline_t)(unsafe.Pointer(pipeline)), (*C.sluice_pipeline_stats_t)(unsafe.Pointer(outStats)))
	})
}

func PipelineGetEvents(pipeline *Pipeline, outEvents *StageEvent, capacity int64, outCount *int64) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_pipeline_get_events((*C.sluice_pipeline_t)(unsafe.Pointer(pipeline)), (*C.sluice_stage_event_t)(unsafe.Pointer(outEvents)), C.int64_t(capacity), (*C.int64_t)(unsafe.Pointer(outCount)))
	})
}

func PipelineTimelineJson(pipeline *Pipeline, which int32, text_ *byte, inoutBytes *uint64) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_pipeline_timeline_json((*C.sluice_pipeline_t)(unsafe.Pointer(pipeline)), C.int32_t(which), (*C.char)(unsafe.Pointer(text_)), (*C.uint64_t)(unsafe.Pointer(inoutBytes)))
	})
}

func LayerMoveBegin(role int32, toLower int32, outMove *LayerMove) {
	C.sluice_layer_move_begin(C.int32_t(role), C.int32_t(toLower), (*C.sluice_layer_move_t)(unsafe.Pointer(outMove)))
}

func LayerMoveArrived(move *LayerMove) {
	C.sluice_layer_move_arrived((*C.sluice_layer_move_t)(unsafe.Pointer(move)))
}

func LayerMoveHeard(move *LayerMove, word uint64) {
	C.sluice_layer_move_heard((*C.sluice_layer_move_t)(unsafe.Pointer(move)), C.uint64_t(word))
}

func LayerMoveRuns(move *LayerMove, microBatch int32, word uint64) int32 {
	return int32(C.sluice_layer_move_runs((*C.sluice_layer_move_t)(unsafe.Pointer(move)), C.int32_t(microBatch), C.uint64_t(word)))
}

func LayerMoveActivationWord(ran int32) uint64 {
	return uint64(C.sluice_layer_move_activation_word(C.int32_t(ran)))
}

func LayerMoveGradientWord(move *LayerMove) uint64 {
	return uint64(C.sluice_layer_move_gradient_word((*C.sluice_layer_move_t)(unsafe.Pointer(move))))
}

func LayerMoveEnded(move *LayerMove) {
	C.sluice_layer_move_ended((*C.sluice_layer_move_t)(unsafe.Pointer(move)))
}

func LayerMoveIsFinal(move *LayerMove) int32 {
	return int32(C.sluice_layer_move_is_final((*C.sluice_layer_move_t)(unsafe.Pointer(move))))
}

func LayerMoveReceives(move *LayerMove) int32 {
	return int32(C.sluice_layer_move_receives((*C.sluice_layer_move_t)(unsafe.Pointer(move))))
}

func PipelineWorkloadInit(outWorkload *PipelineWorkload, structSize uintptr) {
	C.sluice_pipeline_workload_init((*C.sluice_pipeline_workload_t)(unsafe.Pointer(outWorkload)), C.size_t(structSize))
}

func PipelinePredict(workload *PipelineWorkload, outPrediction *PipelinePrediction, outStages *StagePrediction) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_pipeline_predict((*C.sluice_pipeline_workload_t)(unsafe.Pointer(workload)), (*C.sluice_pipeline_prediction_t)(unsafe.Pointer(outPrediction)), (*C.sluice_stage_prediction_t)(unsafe.Pointer(outStages)))
	})
}

func PipelinePolicyName(index int32) string {
	return C.GoString(C.sluice_pipeline_policy_name(C.int32_t(index)))
}

func PlacementProblemInit(outProblem *PlacementProblem, structSize uintptr) {
	C.sluice_placement_problem_init((*C.sluice_placement_problem_t)(unsafe.Pointer(outProblem)), C.size_t(structSize))
}

func PlacementResultInit(outResult *PlacementResult, structSize uintptr) {
	C.sluice_placement_result_init((*C.sluice_placement_result_t)(unsafe.Pointer(outResult)), C.size_t(structSize))
}

func PlannerPlacement(problem *PlacementProblem, inoutResult *PlacementResult) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_planner_placement((*C.sluice_placement_problem_t)(unsafe.Pointer(problem)), (*C.sluice_placement_result_t)(unsafe.Pointer(inoutResult)))
	})
}

func PlannerMoveInit(outMove *PlannerMove, structSize uintptr) {
	C.sluice_planner_move_init((*C.sluice_planner_move_t)(unsafe.Pointer(outMove)), C.size_t(structSize))
}

func PlannerMoveVerdict(move *PlannerMove, outVerdict *int32) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_planner_move_verdict((*C.sluice_planner_move_t)(unsafe.Pointer(move)), (*C.int32_t)(unsafe.Pointer(outVerdict)))
	})
}

func PlanConfigInit(outConfig *PlanConfig, structSize uintptr) {
	C.sluice_plan_config_init((*C.sluice_plan_config_t)(unsafe.Pointer(outConfig)), C.size_t(structSize))
}

func PlanCreate(moe *Moe, config *PlanConfig, outPlan **Plan) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_plan_create((*C.sluice_moe_t)(unsafe.Pointer(moe)), (*C.sluice_plan_config_t)(unsafe.Pointer(config)), (**C.sluice_plan_t)(unsafe.Pointer(outPlan)))
	})
}

func PlanDestroy(plan *Plan) {
	C.sluice_plan_destroy((*C.sluice_plan_t)(unsafe.Pointer(plan)))
}

func PlanGetInfo(plan *Plan, outInfo *PlanInfo) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_plan_get_info((*C.sluice_plan_t)(unsafe.Pointer(plan)), (*C.sluice_plan_info_t)(unsafe.Pointer(outInfo)))
	})
}

func PlanCandidates(plan *Plan, outCandidates *PlanCandidate, capacity int32, outCount *int32) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_plan_candidates((*C.sluice_plan_t)(unsafe.Pointer(plan)), (*C.sluice_plan_candidate_t)(unsafe.Pointer(outCandidates)), C.int32_t(capacity), (*C.int32_t)(unsafe.Pointer(outCount)))
	})
}

func PlanPredictStep(plan *Plan, numChunks int32, rowsPerChunk *int64, keptChunks int32, numTokens int64, numSent int64, outBytes *uint64) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_plan_predict_step((*C.sluice_plan_t)(unsafe.Pointer(plan)), C.int32_t(numChunks), (*C.int64_t)(unsafe.Pointer(rowsPerChunk)), C.int32_t(keptChunks), C.int64_t(numTokens), C.int64_t(numSent), (*C.uint64_t)(unsafe.Pointer(outBytes)))
	})
}

func MoeUsePlan(moe *Moe, plan *Plan) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_moe_use_plan((*C.sluice_moe_t)(unsafe.Pointer(moe)), (*C.sluice_plan_t)(unsafe.Pointer(plan)))
	})
}

func MoeSmallestBudget(moe *Moe, numTokens int64, outBytes *uint64) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_moe_smallest_budget((*C.sluice_moe_t)(unsafe.Pointer(moe)), C.int64_t(numTokens), (*C.uint64_t)(unsafe.Pointer(outBytes)))
	})
}

func PlanWrite(plan *Plan, data unsafe.Pointer, inoutBytes *uint64) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_plan_write((*C.sluice_plan_t)(unsafe.Pointer(plan)), data, (*C.uint64_t)(unsafe.Pointer(inoutBytes)))
	})
}

func PlanRead(moe *Moe, data unsafe.Pointer, bytes uint64, outPlan **Plan) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_plan_read((*C.sluice_moe_t)(unsafe.Pointer(moe)), data, C.uint64_t(bytes), (**C.sluice_plan_t)(unsafe.Pointer(outPlan)))
	})
}

func GetPaperFootprint(rows int64, modelWidth int64, hiddenWidth int64, numExperts int32, numChunks int32, outFootprint *PaperFootprint) {
	C.sluice_paper_footprint(C.int64_t(rows), C.int64_t(modelWidth), C.int64_t(hiddenWidth), C.int32_t(numExperts), C.int32_t(numChunks), (*C.sluice_paper_footprint_t)(unsafe.Pointer(outFootprint)))
}

func PlannerCreate(machineJson *byte, length uint64, outPlanner **Planner) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_planner_create((*C.char)(unsafe.Pointer(machineJson)), C.uint64_t(length), (**C.sluice_planner_t)(unsafe.Pointer(outPlanner)))
	})
}

func PlannerDestroy(planner *Planner) {
	C.sluice_planner_destroy((*C.sluice_planner_t)(unsafe.Pointer(planner)))
}

func PlannerWriteMachine(planner *Planner, text_ *byte, inoutBytes *uint64) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_planner_write_machine((*C.sluice_planner_t)(unsafe.Pointer(planner)), (*C.char)(unsafe.Pointer(text_)), (*C.uint64_t)(unsafe.Pointer(inoutBytes)))
	})
}

func CalibrationConfigInit(outConfig *CalibrationConfig, structSize uintptr) {
	C.sluice_calibration_config_init((*C.sluice_calibration_config_t)(unsafe.Pointer(outConfig)), C.size_t(structSize))
}

func PlannerCalibrate(context *Context, config *CalibrationConfig, outPlanner **Planner) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_planner_calibrate((*C.sluice_context_t)(unsafe.Pointer(context)), (*C.sluice_calibration_config_t)(unsafe.Pointer(config)), (**C.sluice_planner_t)(unsafe.Pointer(outPlanner)))
	})
}

func PlannerWorkloadInit(outWorkload *PlannerWorkload, structSize uintptr) {
	C.sluice_planner_workload_init((*C.sluice_planner_workload_t)(unsafe.Pointer(outWorkload)), C.size_t(structSize))
}

func PlannerPredict(planner *Planner, workload *PlannerWorkload, choice *PlannerChoice, outPrediction *PlannerPrediction, outEntries *PlannerEntry, capacity int32) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_planner_predict((*C.sluice_planner_t)(unsafe.Pointer(planner)), (*C.sluice_planner_workload_t)(unsafe.Pointer(workload)), (*C.sluice_planner_choice_t)(unsafe.Pointer(choice)), (*C.sluice_planner_prediction_t)(unsafe.Pointer(outPrediction)), (*C.sluice_planner_entry_t)(unsafe.Pointer(outEntries)), C.int32_t(capacity))
	})
}

func PlannerChoose(planner *Planner, workload *PlannerWorkload, wanted *PlannerChoice, outCandidates *PlannerCandidate, capacity int32, outCount *int32, outChosen *int32) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_planner_choose((*C.sluice_planner_t)(unsafe.Pointer(planner)), (*C.sluice_planner_workload_t)(unsafe.Pointer(workload)), (*C.sluice_planner_choice_t)(unsafe.Pointer(wanted)), (*C.sluice_planner_candidate_t)(unsafe.Pointer(outCandidates)), C.int32_t(capacity), (*C.int32_t)(unsafe.Pointer(outCount)), (*C.int32_t)(unsafe.Pointer(outChosen)))
	})
}

func PlannerVerdictName(verdict int32) string {
	return C.GoString(C.sluice_planner_verdict_name(C.int32_t(verdict)))
}

func ScheduleConfigInit(outConfig *ScheduleConfig, structSize uintptr) {
	C.sluice_schedule_config_init((*C.sluice_schedule_config_t)(unsafe.Pointer(outConfig)), C.size_t(structSize))
}

func ScheduleCreate(config *ScheduleConfig, outSchedule **Schedule) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_schedule_create((*C.sluice_schedule_config_t)(unsafe.Pointer(config)), (**C.sluice_schedule_t)(unsafe.Pointer(outSchedule)))
	})
}

func ScheduleDestroy(schedule *Schedule) {
	C.sluice_schedule_destroy((*C.sluice_schedule_t)(unsafe.Pointer(schedule)))
}

func ScheduleNumOps(schedule *Schedule) int32 {
	return int32(C.sluice_schedule_num_ops((*C.sluice_schedule_t)(unsafe.Pointer(schedule))))
}

func ScheduleJson(schedule *Schedule, text_ *byte, inoutBytes *uint64) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_schedule_json((*C.sluice_schedule_t)(unsafe.Pointer(schedule)), (*C.char)(unsafe.Pointer(text_)), (*C.uint64_t)(unsafe.Pointer(inoutBytes)))
	})
}

func SchedulePredict(schedule *Schedule, opSeconds *float64, share *float64, outBegin *float64, outEnd *float64, outPrediction *SchedulePrediction) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_schedule_predict((*C.sluice_schedule_t)(unsafe.Pointer(schedule)), (*C.double)(unsafe.Pointer(opSeconds)), (*C.double)(unsafe.Pointer(share)), (*C.double)(unsafe.Pointer(outBegin)), (*C.double)(unsafe.Pointer(outEnd)), (*C.sluice_schedule_prediction_t)(unsafe.Pointer(outPrediction)))
	})
}

func DispatchForward(moe *Moe, tokens *Tensor, expertIds *Tensor, stream unsafe.Pointer, outDispatch **Dispatch) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_dispatch_forward((*C.sluice_moe_t)(unsafe.Pointer(moe)), (*C.sluice_tensor_t)(unsafe.Pointer(tokens)), (*C.sluice_tensor_t)(unsafe.Pointer(expertIds)), C.sluice_stream_t(stream), (**C.sluice_dispatch_t)(unsafe.Pointer(outDispatch)))
	})
}

func DispatchRows(dispatch *Dispatch, outRows *unsafe.Pointer, outNumRows *int64, outRowsPerExpert *int64) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_dispatch_rows((*C.sluice_dispatch_t)(unsafe.Pointer(dispatch)), (*unsafe.Pointer)(unsafe.Pointer(outRows)), (*C.int64_t)(unsafe.Pointer(outNumRows)), (*C.int64_t)(unsafe.Pointer(outRowsPerExpert)))
	})
}

func DispatchCombine(dispatch *Dispatch, rows unsafe.Pointer, routeWeights *Tensor, outTokens *Tensor, stream unsafe.Pointer) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_dispatch_combine((*C.sluice_dispatch_t)(unsafe.Pointer(dispatch)), rows, (*C.sluice_tensor_t)(unsafe.Pointer(routeWeights)), (*C.sluice_tensor_t)(unsafe.Pointer(outTokens)), C.sluice_stream_t(stream))
	})
}

func DispatchCombineBackward(dispatch *Dispatch, rows unsafe.Pointer, routeWeights *Tensor, gradOut *Tensor, gradRows unsafe.Pointer, gradWeightRows *float32, stream unsafe.Pointer) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_dispatch_combine_backward((*C.sluice_dispatch_t)(unsafe.Pointer(dispatch)), rows, (*C.sluice_tensor_t)(unsafe.Pointer(routeWeights)), (*C.sluice_tensor_t)(unsafe.Pointer(gradOut)), gradRows, (*C.float)(unsafe.Pointer(gradWeightRows)), C.sluice_stream_t(stream))
	})
}

func DispatchBackward(dispatch *Dispatch, gradInputRows unsafe.Pointer, gradWeightRows *float32, gradTokens *Tensor, gradRouteWeights *Tensor, stream unsafe.Pointer) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_dispatch_backward((*C.sluice_dispatch_t)(unsafe.Pointer(dispatch)), gradInputRows, (*C.float)(unsafe.Pointer(gradWeightRows)), (*C.sluice_tensor_t)(unsafe.Pointer(gradTokens)), (*C.sluice_tensor_t)(unsafe.Pointer(gradRouteWeights)), C.sluice_stream_t(stream))
	})
}

func DispatchDestroy(dispatch *Dispatch) {
	C.sluice_dispatch_destroy((*C.sluice_dispatch_t)(unsafe.Pointer(dispatch)))
}

func Route(expertIds *Tensor, numExperts int32, outRowsPerExpert *int64, outOrder *int64) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_route((*C.sluice_tensor_t)(unsafe.Pointer(expertIds)), C.int32_t(numExperts), (*C.int64_t)(unsafe.Pointer(outRowsPerExpert)), (*C.int64_t)(unsafe.Pointer(outOrder)))
	})
}

func ExpertsForward(moe *Moe, rows unsafe.Pointer, rowsPerExpert *int64, params *ExpertTensors, pre unsafe.Pointer, outRows unsafe.Pointer, stream unsafe.Pointer) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_experts_forward((*C.sluice_moe_t)(unsafe.Pointer(moe)), rows, (*C.int64_t)(unsafe.Pointer(rowsPerExpert)), (*C.sluice_expert_tensors_t)(unsafe.Pointer(params)), pre, outRows, C.sluice_stream_t(stream))
	})
}

func ExpertsBackward(moe *Moe, rows unsafe.Pointer, pre unsafe.Pointer, rowsPerExpert *int64, params *ExpertTensors, gradRows unsafe.Pointer, gradInputRows unsafe.Pointer, gradParams *ExpertTensors, gradMode int32, stream unsafe.Pointer) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_experts_backward((*C.sluice_moe_t)(unsafe.Pointer(moe)), rows, pre, (*C.int64_t)(unsafe.Pointer(rowsPerExpert)), (*C.sluice_expert_tensors_t)(unsafe.Pointer(params)), gradRows, gradInputRows, (*C.sluice_expert_tensors_t)(unsafe.Pointer(gradParams)), C.int32_t(gradMode), C.sluice_stream_t(stream))
	})
}

func PlannerLayerInit(outLayer *PlannerLayer, structSize uintptr) {
	C.sluice_planner_layer_init((*C.sluice_planner_layer_t)(unsafe.Pointer(outLayer)), C.size_t(structSize))
}

func PlannerProblemInit(outProblem *PlannerProblem, structSize uintptr) {
	C.sluice_planner_problem_init((*C.sluice_planner_problem_t)(unsafe.Pointer(outProblem)), C.size_t(structSize))
}

func PlannerResultInit(outResult *PlannerResult, structSize uintptr) {
	C.sluice_planner_result_init((*C.sluice_planner_result_t)(unsafe.Pointer(outResult)), C.size_t(structSize))
}

func PlannerStages(problem *PlannerProblem, inoutResult *PlannerResult) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_planner_stages((*C.sluice_planner_problem_t)(unsafe.Pointer(problem)), (*C.sluice_planner_result_t)(unsafe.Pointer(inoutResult)))
	})
}

func TunerConfigInit(outConfig *TunerConfig, structSize uintptr) {
	C.sluice_tuner_config_init((*C.sluice_tuner_config_t)(unsafe.Pointer(outConfig)), C.size_t(structSize))
}

func ContextTune(context *Context, config *TunerConfig) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_context_tune((*C.sluice_context_t)(unsafe.Pointer(context)), (*C.sluice_tuner_config_t)(unsafe.Pointer(config)))
	})
}

func ContextDecisions(context *Context, outDecisions *TunerDecision, capacity int32, outCount *int32) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_context_decisions((*C.sluice_context_t)(unsafe.Pointer(context)), (*C.sluice_tuner_decision_t)(unsafe.Pointer(outDecisions)), C.int32_t(capacity), (*C.int32_t)(unsafe.Pointer(outCount)))
	})
}

func ContextDecidedPolicies(context *Context, outPolicies *TunerPolicy, capacity int32, outCount *int32) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_context_decided_policies((*C.sluice_context_t)(unsafe.Pointer(context)), (*C.sluice_tuner_policy_t)(unsafe.Pointer(outPolicies)), C.int32_t(capacity), (*C.int32_t)(unsafe.Pointer(outCount)))
	})
}

func ContextDecidedParts(context *Context, outKeptChunks *int32, capacity int32, outCount *int32) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_context_decided_parts((*C.sluice_context_t)(unsafe.Pointer(context)), (*C.int32_t)(unsafe.Pointer(outKeptChunks)), C.int32_t(capacity), (*C.int32_t)(unsafe.Pointer(outCount)))
	})
}

func ContextTunerStats(context *Context, outStats *TunerStats) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_context_tuner_stats((*C.sluice_context_t)(unsafe.Pointer(context)), (*C.sluice_tuner_stats_t)(unsafe.Pointer(outStats)))
	})
}

func ContextWriteDecisions(context *Context, text_ *byte, inoutBytes *uint64) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_context_write_decisions((*C.sluice_context_t)(unsafe.Pointer(context)), (*C.char)(unsafe.Pointer(text_)), (*C.uint64_t)(unsafe.Pointer(inoutBytes)))
	})
}

func ContextReadDecisions(context *Context, text_ *byte, length uint64) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_context_read_decisions((*C.sluice_context_t)(unsafe.Pointer(context)), (*C.char)(unsafe.Pointer(text_)), C.uint64_t(length))
	})
}

func ContextWriteMachine(context *Context, text_ *byte, inoutBytes *uint64) error {
	return checked(func() C.sluice_status_t {
		return C.sluice_context_write_machine((*C.sluice_context_t)(unsafe.Pointer(context)), (*C.char)(unsafe.Pointer(text_)), (*C.uint64_t)(unsafe.Pointer(inoutBytes)))
	})
}

func TunerWhyName(why int32) string {
	return C.GoString(C.sluice_tuner_why_name(C.int32_t(why)))
}

// New is a struct with its defaults in memory of C; Free ends it.
func New[T any]() *T {
	it := &Slice[T](1)[0]
	switch s := any(it).(type) {
	case *ErrorInfo:
		ErrorInfoInit(s, unsafe.Sizeof(*s))
	case *CommConfig:
		CommConfigInit(s, unsafe.Sizeof(*s))
	case *HostCommVtable:
		s.StructSize = unsafe.Sizeof(*s)
	case *NcclGroup:
		NcclGroupInit(s, unsafe.Sizeof(*s))
	case *TcpConfig:
		TcpConfigInit(s, unsafe.Sizeof(*s))
	case *ContextConfig:
		ContextConfigInit(s, unsafe.Sizeof(*s))
	case *ContextStats:
		s.StructSize = unsafe.Sizeof(*s)
	case *GateConfig:
		GateConfigInit(s, unsafe.Sizeof(*s))
	case *MigrationConfig:
		MigrationConfigInit(s, unsafe.Sizeof(*s))
	case *MigrationProgress:
		s.StructSize = unsafe.Sizeof(*s)
	case *MoeConfig:
		MoeConfigInit(s, unsafe.Sizeof(*s))
	case *ExpertPlacement:
		ExpertPlacementInit(s, unsafe.Sizeof(*s))
	case *ExpertTensors:
		s.StructSize = unsafe.Sizeof(*s)
	case *ExpertCallbacks:
		s.StructSize = unsafe.Sizeof(*s)
	case *MoeForwardArgs:
		MoeForwardArgsInit(s, unsafe.Sizeof(*s))
	case *MoeBackwardArgs:
		MoeBackwardArgsInit(s, unsafe.Sizeof(*s))
	case *CapacityReport:
		CapacityReportInit(s, unsafe.Sizeof(*s))
	case *OptimizerConfig:
		OptimizerConfigInit(s, unsafe.Sizeof(*s))
	case *OptimizerGroup:
		OptimizerGroupInit(s, unsafe.Sizeof(*s))
	case *OptimizerStepArgs:
		OptimizerStepArgsInit(s, unsafe.Sizeof(*s))
	case *OptimizerStepResult:
		OptimizerStepResultInit(s, unsafe.Sizeof(*s))
	case *OptimizerFileConfig:
		OptimizerFileConfigInit(s, unsafe.Sizeof(*s))
	case *OptimizerFileInfo:
		OptimizerFileInfoInit(s, unsafe.Sizeof(*s))
	case *OptimizerWorkload:
		OptimizerWorkloadInit(s, unsafe.Sizeof(*s))
	case *OptimizerPrediction:
		OptimizerPredictionInit(s, unsafe.Sizeof(*s))
	case *StageCall:
		s.StructSize = unsafe.Sizeof(*s)
	case *PipelineCallbacks:
		s.StructSize = unsafe.Sizeof(*s)
	case *PipelineConfig:
		PipelineConfigInit(s, unsafe.Sizeof(*s))
	case *PipelineBatch:
		PipelineBatchInit(s, unsafe.Sizeof(*s))
	case *PipelineStats:
		s.StructSize = unsafe.Sizeof(*s)
	case *PipelineWorkload:
		PipelineWorkloadInit(s, unsafe.Sizeof(*s))
	case *PipelinePrediction:
		s.StructSize = unsafe.Sizeof(*s)
	case *PlacementProblem:
		PlacementProblemInit(s, unsafe.Sizeof(*s))
	case *PlacementResult:
		PlacementResultInit(s, unsafe.Sizeof(*s))
	case *PlannerMove:
		PlannerMoveInit(s, unsafe.Sizeof(*s))
	case *PlanConfig:
		PlanConfigInit(s, unsafe.Sizeof(*s))
	case *PlanInfo:
		s.StructSize = unsafe.Sizeof(*s)
	case *CalibrationConfig:
		CalibrationConfigInit(s, unsafe.Sizeof(*s))
	case *PlannerWorkload:
		PlannerWorkloadInit(s, unsafe.Sizeof(*s))
	case *PlannerPrediction:
		s.StructSize = unsafe.Sizeof(*s)
	case *ScheduleConfig:
		ScheduleConfigInit(s, unsafe.Sizeof(*s))
	case *SchedulePrediction:
		s.StructSize = unsafe.Sizeof(*s)
	case *PlannerLayer:
		PlannerLayerInit(s, unsafe.Sizeof(*s))
	case *PlannerProblem:
		PlannerProblemInit(s, unsafe.Sizeof(*s))
	case *PlannerResult:
		PlannerResultInit(s, unsafe.Sizeof(*s))
	case *TunerConfig:
		TunerConfigInit(s, unsafe.Sizeof(*s))
	case *TunerStats:
		s.StructSize = unsafe.Sizeof(*s)
	}
	return it
}

// Error is what a call that failed says of itself.
type Error struct {
	Status  int32
	Message string
}

func (e *Error) Error() string { return StatusName(e.Status) + ": " + e.Message }

// Holds the goroutine on its thread: the library keeps the story of a failure for the thread that saw it.
func checked(call func() C.sluice_status_t) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	status := int32(call())
	if status == OK {
		return nil
	}
	var why C.sluice_error_info_t
	C.sluice_error_info_init(&why, C.size_t(unsafe.Sizeof(why)))
	C.sluice_error_last(&why)
	return &Error{status, C.GoString(&why.message[0])}
}

// Slice is count zeroed elements in memory of C, which holds no Go pointer. Free(&it[0]) ends it.
func Slice[T any](count int) []T {
	var one T
	return unsafe.Slice((*T)(C.calloc(C.size_t(count), C.size_t(unsafe.Sizeof(one)))), count)
}

// Free gives back what New, Slice and Text handed out.
func Free[T any](memory *T) { C.free(unsafe.Pointer(memory)) }

// NewTensor describes row-major 32-bit elements in memory of C; Free(it.Shape) and Free(it) end it.
func NewTensor[T any](data []T, typeCode uint8, shape ...int64) *Tensor {
	it, lengths := New[Tensor](), Slice[int64](len(shape))
	copy(lengths, shape)
	it.Data, it.Shape, it.Ndim = unsafe.Pointer(&data[0]), &lengths[0], int32(len(shape))
	it.DeviceType, it.TypeCode, it.TypeBits, it.TypeLanes = DEVICE_CPU, typeCode, 32, 1
	return it
}

// Text is a terminated copy in memory of C.
func Text(text string) *byte { return (*byte)(unsafe.Pointer(C.CString(text))) }
