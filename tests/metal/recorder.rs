//! A GPU that executes nothing and records costs: operations and bytes of each dispatch, from the arguments and the
//! lists that its kernel would read.

use std::any::Any;
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytemuck::{Pod, Zeroable, pod_read_unaligned};
use tinyvllm::ops::gpu::{
    Binding, ChipClass, Constant, Gpu, GpuBuffer, GpuMemory, Launch, Library, Pipeline, PipelineLimits,
    Placement, Ticket,
};
use tinyvllm::weights::{DType, SharedBytes};
use tinyvllm::{Error, Result};

/// The smallest chip, as the table of BENCHMARKS.md has it: an M1.
const OPERATIONS_PER_SECOND: f64 = 2e12;
const BYTES_PER_SECOND: f64 = 68e9;

/// Threadgroup memory of an NVIDIA GPU.
const NVIDIA_MEMORY: usize = 227 << 10;

/// The work of a dispatch.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Dispatch {
    pub(crate) function: String,
    /// Multiplications and additions, also those with zeros that fill a tile.
    pub(crate) operations: f64,
    pub(crate) bytes: f64,
}

impl Dispatch {
    pub(crate) fn seconds(&self) -> f64 {
        (self.operations / OPERATIONS_PER_SECOND).max(self.bytes / BYTES_PER_SECOND)
    }
}

/// The device.
#[derive(Debug)]
pub(crate) struct Recorder {
    class: ChipClass,
    dispatch_budget: Duration,
    copy_bandwidth: Option<f64>,
    compiled_late: Option<&'static str>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct Kernel {
    function: String,
    constants: Vec<Constant>,
    /// Whether a GPU would have compiled it by now.
    is_compiled: bool,
    num_dispatches: u64,
}

#[derive(Debug, Default)]
struct State {
    kernels: Vec<Kernel>,
    /// The dispatches of each command buffer; the last one is open.
    commits: Vec<Vec<Dispatch>>,
}

/// Private memory has a size only.
#[derive(Debug)]
struct Memory {
    len: usize,
    shared: Option<Mutex<Vec<u8>>>,
}

impl Memory {
    fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        let shared = self.shared.as_ref().unwrap();
        shared.lock().unwrap_or_else(PoisonError::into_inner)[offset..offset + len].to_vec()
    }
}

impl GpuMemory for Memory {
    fn len(&self) -> usize {
        self.len
    }

    fn host(&self) -> Option<NonNull<u8>> {
        None
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

fn memory_of(buffer: &GpuBuffer) -> &Memory {
    buffer.0.as_any().downcast_ref().unwrap()
}

impl Recorder {
    pub(crate) fn new(dispatch_budget: Duration) -> Self {
        let state = State { kernels: Vec::new(), commits: vec![Vec::new()] };
        Self {
            class: ChipClass::Base,
            dispatch_budget,
            copy_bandwidth: None,
            compiled_late: None,
            state: Mutex::new(state),
        }
    }

    /// As a chip of this class. Kernels for tensor cores are not recorded.
    pub(crate) fn with_class(self, class: ChipClass) -> Self {
        Self { class, ..self }
    }

    fn limits(&self) -> PipelineLimits {
        let max_memory = match self.class {
            ChipClass::Nvidia => NVIDIA_MEMORY,
            _ => PipelineLimits::APPLE.max_memory,
        };
        PipelineLimits { max_memory, ..PipelineLimits::APPLE }
    }

    /// The measured bandwidth of a copy.
    pub(crate) fn with_copy_bandwidth(self, bytes_per_second: f64) -> Self {
        Self { copy_bandwidth: Some(bytes_per_second), ..self }
    }

    /// Compiles one kernel when it is first dispatched, as if it had not been asked for before.
    pub(crate) fn with_late_compilation(self, function: &'static str) -> Self {
        Self { compiled_late: Some(function), ..self }
    }

    /// The kernels that are compiled, and how often each was dispatched.
    pub(crate) fn compiled(&self) -> BTreeMap<String, u64> {
        let state = self.state();
        let compiled = state.kernels.iter().filter(|kernel| kernel.is_compiled);
        let name = |kernel: &Kernel| format!("{} {:?}", kernel.function, kernel.constants);
        compiled.map(|kernel| (name(kernel), kernel.num_dispatches)).collect()
    }

    /// The dispatches since the last call, by command buffer.
    pub(crate) fn take(&self) -> Vec<Vec<Dispatch>> {
        std::mem::replace(&mut self.state().commits, vec![Vec::new()])
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Gpu for Recorder {
    fn name(&self) -> &str {
        "recorder"
    }

    fn class(&self) -> ChipClass {
        self.class
    }

    fn threadgroup_memory(&self) -> usize {
        self.limits().max_memory
    }

    fn working_set_bytes(&self) -> u64 {
        u64::MAX
    }

    fn measure_copy_bandwidth(&self) -> Result<Option<f64>> {
        Ok(self.copy_bandwidth)
    }

    fn dispatch_budget(&self) -> Duration {
        self.dispatch_budget
    }

    fn allocate(&self, len: usize, placement: Placement) -> Result<GpuBuffer> {
        let shared = (placement == Placement::Shared).then(|| Mutex::new(vec![0; len]));
        Ok(GpuBuffer(Box::new(Memory { len, shared })))
    }

    fn wrap(&self, bytes: &SharedBytes) -> Result<Option<(GpuBuffer, usize)>> {
        Ok(Some((GpuBuffer(Box::new(Memory { len: bytes.len(), shared: None })), 0)))
    }

    fn pipeline(
        &self,
        _library: &'static Library,
        function: &str,
        constants: &[Constant],
    ) -> Result<Pipeline> {
        let mut state = self.state();
        let is_same = |kernel: &Kernel| kernel.function == function && kernel.constants == constants;
        let index = state.kernels.iter().position(is_same).unwrap_or(state.kernels.len());
        if index == state.kernels.len() {
            state.kernels.push(Kernel {
                function: function.to_owned(),
                constants: constants.to_vec(),
                is_compiled: self.compiled_late != Some(function),
                num_dispatches: 0,
            });
        }
        Ok(Pipeline { index, limits: self.limits() })
    }

    fn dispatch(&self, launch: &Launch<'_>) -> Result<()> {
        let mut state = self.state();
        let kernel = &mut state.kernels[launch.pipeline.index];
        kernel.is_compiled = true;
        kernel.num_dispatches += 1;
        let function = kernel.function.clone();
        let is_grouped = kernel.constants.contains(&Constant::Bool(3, true));
        launch.check(&function, self.limits())?;
        for binding in launch.buffers {
            assert!(binding.offset < binding.buffer.len(), "{function}: {binding:?}");
        }
        if self.class == ChipClass::Nvidia {
            return Ok(());
        }
        // The last number is the width of values.
        let value_dim = kernel.constants.iter().rev().find_map(|constant| match constant {
            Constant::U16(_, number) => Some(f64::from(*number)),
            Constant::Bool(..) => None,
        });
        let (operations, bytes) = work_of(&function, is_grouped, value_dim.unwrap_or(0.0), launch);
        let open = state.commits.last_mut().ok_or_else(|| Error::internal("no command buffer is open"))?;
        open.push(Dispatch { function, operations, bytes });
        Ok(())
    }

    fn write(&self, target: &GpuBuffer, offset: usize, bytes: &[u8]) -> Result<()> {
        if let Some(shared) = &memory_of(target).shared {
            let mut shared = shared.lock().unwrap_or_else(PoisonError::into_inner);
            shared[offset..offset + bytes.len()].copy_from_slice(bytes);
        }
        Ok(())
    }

    fn read(&self, _source: &GpuBuffer, _offset: usize, bytes: &mut [u8]) -> Result<()> {
        bytes.fill(0);
        self.commit().map(drop)
    }

    fn commit(&self) -> Result<Ticket> {
        let mut state = self.state();
        if state.commits.last().is_some_and(|open| !open.is_empty()) {
            state.commits.push(Vec::new());
        }
        Ok(Ticket(0))
    }

    fn wait(&self, _ticket: Ticket) -> Result<()> {
        Ok(())
    }
}

/// `Planes` and `MatrixArgs` of `formats.h`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct MatrixArgs {
    planes: [u32; 3],
    num_rows: u32,
    out_offset: u32,
    first_group: u32,
}

/// `MatvecArgs` and `MatmulArgs`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct MatmulArgs {
    num_units: u32,
    num_tokens: u32,
    x_stride: u32,
    out_stride: u32,
    x_next: u32,
    out_next: u32,
    gathers: u32,
    eps: f32,
    matrices: [MatrixArgs; 3],
}

/// `Pages` of `kv_cache.h` and the next fields in the arguments of all attention kernels.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct AttentionArgs {
    num_kv_heads: u32,
    block_size: u32,
    head_dim: u32,
    block_rows: u32,
    scales: u32,
    num_heads: u32,
    q_stride: u32,
}

/// `DecodeRow` of `kv_cache.h`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct DecodeRow {
    token: u32,
    seq_len: u32,
    table_start: u32,
}

/// `PrefillTile` of `flash_attention.metal`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct PrefillTile {
    first_token: u32,
    num_tokens: u32,
    first_position: u32,
    table_start: u32,
}

fn word(args: &[u8], index: usize) -> f64 {
    f64::from(pod_read_unaligned::<u32>(&args[4 * index..4 * index + 4]))
}

fn list<T: Pod>(binding: &Binding<'_>, len: usize) -> Vec<T> {
    let bytes = memory_of(binding.buffer).read(binding.offset, len * size_of::<T>());
    bytes.chunks_exact(size_of::<T>()).map(pod_read_unaligned).collect()
}

/// Operations and bytes of a launch.
///
/// # Panics
/// For an unknown kernel, so that none is missed.
fn work_of(function: &str, is_grouped: bool, value_dim: f64, launch: &Launch<'_>) -> (f64, f64) {
    const FAMILIES: [&str; 22] = [
        "matvec_swiglu_",
        "matvec_",
        "matmul_swiglu_",
        "matmul_",
        "silu_mul",
        "gated_experts",
        "gated",
        "norm_part",
        "norm_residual",
        "rope_kv_write_",
        "embed_",
        "gather_rows",
        "copy_block",
        "paged_attention_merge",
        "paged_attention_",
        "flash_attention_",
        "latent_kv_write_",
        "latent_read_",
        "latent_attention_",
        "choose_experts",
        "combine_experts",
        "sample",
    ];
    let Launch { args, buffers, grid, num_threads, .. } = *launch;
    let family = FAMILIES.into_iter().find(|family| function.starts_with(family)).unwrap_or_default();
    let rest = &function[family.len()..];
    let num_groups = (grid[0] * grid[1]) as f64;
    match family {
        "matvec_swiglu_" => matmul(args, rest, 2, grid[1], is_grouped),
        "matvec_" => matmul(args, rest, 3, grid[1], is_grouped),
        "matmul_swiglu_" => matmul(args, rest, 2, grid[2], is_grouped),
        "matmul_" => matmul(args, rest, 3, grid[2], is_grouped),
        "silu_mul" => (0.0, 12.0 * word(args, 0)),
        "gated_experts" => {
            let num_operands = if word(args, 2) == 0.0 { 3.0 } else { 5.0 };
            (0.0, 4.0 * num_operands * grid[1] as f64 * word(args, 0) * word(args, 1))
        }
        "gated" => (0.0, 12.0 * grid[1] as f64 * word(args, 0)),
        "norm_part" => (0.0, 8.0 * grid[0] as f64 * word(args, 0)),
        "norm_residual" => (0.0, 12.0 * grid[0] as f64 * word(args, 0)),
        "rope_kv_write_" => {
            let num_all_heads = word(args, 5) + 2.0 * word(args, 0);
            (0.0, 8.0 * grid[1] as f64 * num_all_heads * word(args, 2))
        }
        "embed_" => (0.0, 8.0 * grid[1] as f64 * 16.0 * word(args, 3)),
        "gather_rows" => (0.0, 8.0 * word(args, 0) * word(args, 1)),
        "copy_block" => (0.0, 32.0 * word(args, 2)),
        "paged_attention_merge" => (0.0, 4.0 * num_groups * word(args, 8) * (word(args, 2) + 2.0)),
        "paged_attention_" => decode(args, rest, &list(&buffers[4], grid[2])),
        "flash_attention_" => {
            prefill(args, rest, value_dim, num_threads / 32 * 8, &list(&buffers[4], grid[0]))
        }
        "latent_kv_write_" => {
            let (heads, rank, rotated) = (word(args, 5), word(args, 9), 2.0 * word(args, 10));
            (0.0, 8.0 * grid[1] as f64 * (heads * rotated + rank + rotated))
        }
        "latent_read_" => {
            let [row_dim, rank, heads] = [2, 5, 6].map(|index| word(args, index));
            (0.0, 4.0 * num_groups * (2.0 * row_dim + heads * (row_dim - rank)))
        }
        "latent_attention_" => latent(args, rest, grid, &list(&buffers[3], grid[2])),
        "choose_experts" => {
            let [rows, all, chosen, shared] = [0, 1, 2, 3].map(|index| word(args, index));
            let comparisons = 2.0 * rows * (chosen + shared) * (all + shared);
            (comparisons + rows * all * (chosen + 4.0), 4.0 * rows * all)
        }
        "combine_experts" => {
            let per_choice = if word(args, 2) == 0.0 { 1.0 } else { 2.0 };
            (0.0, 4.0 * grid[1] as f64 * word(args, 0) * (per_choice * word(args, 1) + 2.0))
        }
        // Two filters of 48 passes over each row of logits.
        "sample" => (0.0, 4.0 * 96.0 * grid[0] as f64 * word(args, 0)),
        _ => panic!("what {function} costs is not known"),
    }
}

/// `rest` is the format and the number of rows of activations that a threadgroup computes. Each of the matrices may be
/// a stack, of which this many are multiplied.
fn matmul(args: &[u8], rest: &str, num_matrices: usize, num_stacked: usize, is_grouped: bool) -> (f64, f64) {
    let args: MatmulArgs = pod_read_unaligned(&args[..size_of::<MatmulArgs>()]);
    let (format, unit) = rest.rsplit_once('_').unwrap();
    // If the last matrix has another format, which comes after, it counts like the others.
    let is_first = |dtype: &DType| {
        let rest = format.strip_prefix(&dtype.to_string());
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with("_Q"))
    };
    let dtype = DType::ALL.into_iter().find(is_first).unwrap();
    let unit: u32 = unit.parse().unwrap();
    // Groups may be full.
    let num_tokens = if is_grouped { unit } else { args.num_tokens };
    let num_padded = f64::from(num_tokens.next_multiple_of(unit));
    let num_rows: u32 = args.matrices[..num_matrices].iter().map(|matrix| matrix.num_rows).sum();
    let num_weights = f64::from(num_rows) * 16.0 * f64::from(args.num_units);
    let weight_bytes = dtype.block_bytes() as f64 / dtype.block_len() as f64;
    let activations = 4.0 * f64::from(num_tokens) * (f64::from(num_rows) + 16.0 * f64::from(args.num_units));
    let num_stacked = num_stacked as f64;
    (2.0 * num_padded * num_weights * num_stacked, (weight_bytes * num_weights + activations) * num_stacked)
}

fn value_bytes(rest: &str) -> f64 {
    match rest {
        _ if rest.starts_with("f32") => 4.0,
        _ if rest.starts_with("q8_0") => 1.0 + 2.0 / 32.0,
        _ if rest.starts_with("fp8_e4m3") => 1.0,
        _ => 2.0,
    }
}

/// Each sequence reads all keys and values that its token attends to.
fn decode(args: &[u8], rest: &str, rows: &[DecodeRow]) -> (f64, f64) {
    let a: AttentionArgs = pod_read_unaligned(&args[..size_of::<AttentionArgs>()]);
    let window = word(args, 9);
    let num_keys: f64 = rows.iter().map(|row| f64::from(row.seq_len).min(window)).sum();
    let values = f64::from(a.head_dim) * num_keys;
    (4.0 * f64::from(a.num_heads) * values, 2.0 * f64::from(a.num_kv_heads) * value_bytes(rest) * values)
}

/// Each token reads the rows that it attends to, once for all heads of a threadgroup.
fn latent(args: &[u8], rest: &str, grid: [usize; 3], rows: &[DecodeRow]) -> (f64, f64) {
    let (row_dim, num_heads, value_dim) = (word(args, 2), word(args, 5), word(args, 6));
    let num_keys: f64 = rows.iter().map(|row| f64::from(row.seq_len)).sum();
    let bytes = grid[0] as f64 * value_bytes(rest) * row_dim * num_keys;
    (2.0 * num_heads * (row_dim + value_dim) * num_keys, bytes)
}

/// Each tile reads the keys and values of all of its tokens, as far as they are in the span.
fn prefill(args: &[u8], rest: &str, value_dim: f64, num_rows: usize, tiles: &[PrefillTile]) -> (f64, f64) {
    let a: AttentionArgs = pod_read_unaligned(&args[..size_of::<AttentionArgs>()]);
    let [window, begin, end] = [7, 9, 10].map(|index| word(args, index));
    let keys = |tile: &PrefillTile| {
        let first = f64::from(tile.first_position);
        let num_keys = (first + f64::from(tile.num_tokens)).min(end) - (first + 1.0 - window).max(begin);
        assert!(num_keys > 0.0, "a tile that reaches none of its keys");
        num_keys
    };
    let values =
        f64::from(a.num_kv_heads) * (f64::from(a.head_dim) + value_dim) * tiles.iter().map(keys).sum::<f64>();
    (2.0 * num_rows as f64 * values, value_bytes(rest) * values)
}
