//! Launches and graphs in the driver's format.

use std::ffi::c_void;
use std::mem::{MaybeUninit, offset_of};
use std::ptr::{null, null_mut};

use cudarc::driver::sys::{
    CUDA_KERNEL_NODE_PARAMS, CUDA_KERNEL_NODE_PARAMS_v3, CUfunction, CUgraph, CUgraphEdgeData, CUgraphExec,
    CUgraphNode, CUgraphNodeParams, CUgraphNodeType, CUlaunchAttribute, CUlaunchAttributeID,
    CUlaunchAttributeValue, CUlaunchConfig, cuGraphAddNode_v2, cuGraphCreate, cuGraphDestroy,
    cuGraphExecDestroy, cuGraphExecKernelNodeSetParams_v2, cuGraphInstantiateWithFlags, cuGraphLaunch,
    cuLaunchKernelEx,
};

use super::MAX_ARGUMENT_WORDS;
use super::driver::{Device, Doing};
use super::repeated::{Call, LaunchSequence, Launcher};
use crate::Result;

/// The first GPUs on which a kernel may begin before the previous one has ended.
const OVERLAPPING_ARCHITECTURE: i32 = 90;

/// The first driver, by its version of CUDA, whose graphs have such edges.
const MIN_DRIVER_OF_GRAPHS: i32 = 12_030;

/// The edge after a kernel that triggers the next one itself: `CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC` and
/// `CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC`.
const OVERLAPPING_EDGE: CUgraphEdgeData =
    CUgraphEdgeData { from_port: 1, to_port: 0, type_: 1, reserved: [0; 5] };
const PLAIN_EDGE: CUgraphEdgeData = CUgraphEdgeData { from_port: 0, to_port: 0, type_: 0, reserved: [0; 5] };

/// A graph with its kernels in the order of launches.
#[derive(Debug)]
pub(super) struct Graph {
    graph: CUgraph,
    nodes: Vec<CUgraphNode>,
    /// Its executable form.
    exec: CUgraphExec,
}

impl Device {
    fn overlaps(&self) -> bool {
        self.architecture >= OVERLAPPING_ARCHITECTURE
    }

    /// A graph with a chain of nodes, one per launch. The caller owns the contents of `graph` and `nodes`, also after
    /// an error.
    fn fill(
        &self,
        sequence: &LaunchSequence<CUfunction>,
        graph: CUgraph,
        nodes: &mut Vec<CUgraphNode>,
    ) -> Result<CUgraphExec> {
        let doing = "a graph of kernels";
        for index in 0..sequence.len() {
            let (call, arguments) = sequence.get(index);
            let arguments = padded(arguments);
            let mut list = [arguments.as_ptr().cast_mut().cast::<c_void>()];
            // SAFETY: a structure of numbers and pointers, for which zeros are values.
            let mut params: CUgraphNodeParams = unsafe { MaybeUninit::zeroed().assume_init() };
            params.type_ = CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL;
            params.__bindgen_anon_1.kernel = node_params(&call, &mut list);
            let mut node = null_mut();
            let before = nodes.last().copied();
            let edge = if self.overlaps() { OVERLAPPING_EDGE } else { PLAIN_EDGE };
            let (from, edges) =
                before.as_ref().map_or((null(), null()), |node| (&raw const *node, &raw const edge));
            let count = usize::from(before.is_some());
            // SAFETY: the graph and the previous node exist; arguments are copied before the call returns, as those of
            // a launch.
            unsafe { cuGraphAddNode_v2(&raw mut node, graph, from, edges, count, &raw mut params) }
                .result()
                .doing(doing)?;
            nodes.push(node);
        }
        let mut exec = null_mut();
        // SAFETY: the graph was just made.
        unsafe { cuGraphInstantiateWithFlags(&raw mut exec, graph, 0) }.result().doing(doing)?;
        Ok(exec)
    }
}

// The structure for new nodes and the one for replaced arguments have two names and are the same.
const _: () = {
    type Older = CUDA_KERNEL_NODE_PARAMS;
    type Newer = CUDA_KERNEL_NODE_PARAMS_v3;
    assert!(size_of::<Older>() == size_of::<Newer>());
    assert!(offset_of!(Older, gridDimX) == offset_of!(Newer, gridDimX));
    assert!(offset_of!(Older, sharedMemBytes) == offset_of!(Newer, sharedMemBytes));
    assert!(offset_of!(Older, kernelParams) == offset_of!(Newer, kernelParams));
    assert!(offset_of!(Older, ctx) == offset_of!(Newer, ctx));
};

/// A launch as a graph's node, with the address of its arguments.
fn node_params(call: &Call<CUfunction>, arguments: &mut [*mut c_void; 1]) -> CUDA_KERNEL_NODE_PARAMS_v3 {
    let [x, y, z] = call.grid;
    CUDA_KERNEL_NODE_PARAMS_v3 {
        func: call.function,
        gridDimX: x,
        gridDimY: y,
        gridDimZ: z,
        blockDimX: call.num_threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: call.memory,
        kernelParams: arguments.as_mut_ptr(),
        extra: null_mut(),
        kern: null_mut(),
        ctx: null_mut(),
    }
}

/// Arguments padded with zeros to the maximum size of a kernel's, which the driver may read.
fn padded(arguments: &[u64]) -> [u64; MAX_ARGUMENT_WORDS] {
    let mut all = [0; MAX_ARGUMENT_WORDS];
    all[..arguments.len()].copy_from_slice(arguments);
    all
}

impl Launcher for Device {
    type Function = CUfunction;
    type Graph = Graph;

    fn has_graphs(&self) -> bool {
        self.driver >= MIN_DRIVER_OF_GRAPHS
    }

    fn launch(&self, call: &Call<CUfunction>, arguments: &[u64]) -> Result<()> {
        let arguments = padded(arguments);
        let mut list = [arguments.as_ptr().cast_mut().cast::<c_void>()];
        let [x, y, z] = call.grid;
        // It may begin while the previous one still runs, and waits for it itself.
        let value = CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 };
        let id = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        let mut overlaps = CUlaunchAttribute { id, pad: [0; 4], value };
        let config = CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: call.num_threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: call.memory,
            hStream: self.queue,
            attrs: &raw mut overlaps,
            numAttrs: u32::from(self.overlaps()),
        };
        // SAFETY: every kernel takes such a structure or a shorter one, and it is copied before the call returns. The
        // driver checks the sizes. The emulator finds kernels that access memory outside their buffers.
        let result =
            unsafe { cuLaunchKernelEx(&raw const config, call.function, list.as_mut_ptr(), null_mut()) };
        result.result().doing("launching a kernel")
    }

    fn build(&self, sequence: &LaunchSequence<CUfunction>) -> Result<Graph> {
        self.enter()?;
        let mut graph = null_mut();
        // SAFETY: the graph is written to a variable.
        unsafe { cuGraphCreate(&raw mut graph, 0) }.result().doing("a graph of kernels")?;
        let mut nodes = Vec::with_capacity(sequence.len());
        match self.fill(sequence, graph, &mut nodes) {
            Ok(exec) => Ok(Graph { graph, nodes, exec }),
            Err(error) => {
                // SAFETY: the graph was made above and no other code has it.
                _ = unsafe { cuGraphDestroy(graph) };
                Err(error)
            }
        }
    }

    fn replace(
        &self,
        graph: &mut Graph,
        index: usize,
        call: &Call<CUfunction>,
        arguments: &[u64],
    ) -> Result<()> {
        let arguments = padded(arguments);
        let mut list = [arguments.as_ptr().cast_mut().cast::<c_void>()];
        let params = node_params(call, &mut list);
        // SAFETY: both versions of the structure have the same fields. The node is one of the graph, which lives as
        // long as its executable form; arguments are copied before the call returns. A graph that is already queued
        // keeps its previous arguments.
        unsafe {
            cuGraphExecKernelNodeSetParams_v2(graph.exec, graph.nodes[index], (&raw const params).cast())
        }
        .result()
        .doing("the arguments of a graph of kernels")
    }

    fn replay(&self, graph: &Graph) -> Result<()> {
        // SAFETY: both live.
        unsafe { cuGraphLaunch(graph.exec, self.queue) }.result().doing("launching a graph of kernels")
    }

    fn destroy(&self, graph: Graph) -> Result<()> {
        self.finish()?;
        // SAFETY: no queued work uses it any more, and it has no other owner.
        unsafe {
            cuGraphExecDestroy(graph.exec).result().doing("a graph of kernels")?;
            cuGraphDestroy(graph.graph).result().doing("a graph of kernels")
        }
    }
}
