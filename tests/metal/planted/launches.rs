//! Defects of launches: a device that deviates from its commands.
//!
//! All decisions of the host reach a device through [`Gpu`]. So a wrong line of the host is simulated there: another
//! argument, another offset, a smaller grid.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tinyvllm::Result;
use tinyvllm::ops::gpu::{
    Access, Binding, ChipClass, Constant, Gpu, GpuBuffer, Launch, Library, Pipeline, Placement, Ticket,
};
use tinyvllm::weights::SharedBytes;

use crate::emulator::Emulator;

/// The defect of a kernel's launches. Buffers have their numbers in the kernel.
#[derive(Clone, Copy)]
pub(super) enum Change {
    /// A word of the arguments.
    Word(usize, fn(u32) -> u32),
    /// Where a buffer begins.
    Offset(usize, fn(usize) -> usize),
    /// The first gets the value of the second.
    Buffer(usize, usize),
    /// The declared use of a buffer.
    Declared(usize, Access),
    /// The threadgroups of a dimension.
    Grid(usize, fn(usize) -> usize),
    /// The threads of a group.
    Threads(fn(usize) -> usize),
    /// The bytes of threadgroup memory.
    Memory(fn(usize) -> usize),
    /// A function constant has the opposite value.
    Flag(u32),
    /// A function constant that is a number.
    Number(fn(u16) -> u16),
    /// It is another kernel, by the end of its name.
    Ending(&'static str, &'static str),
    /// A buffer with a list: the words of a record and one of them, in the number of records that the grid has in a
    /// dimension; in the whole buffer, if there is no such dimension.
    List(usize, [usize; 2], usize, fn(u32) -> u32),
    /// There is none.
    LeftOut,
    /// Waits do nothing.
    NotWaitedFor,
}

impl fmt::Debug for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Change")
    }
}

/// A device whose launches have a defect.
#[derive(Debug)]
pub(super) struct Altered {
    gpu: Emulator,
    /// How the names of the kernels begin whose launches it changes.
    kernels: &'static str,
    change: Change,
    /// The names of pipelines.
    names: Mutex<HashMap<usize, String>>,
}

impl Altered {
    pub(super) fn new(gpu: Emulator, kernels: &'static str, change: Change) -> Self {
        Self { gpu, kernels, change, names: Mutex::default() }
    }

    fn names(&self) -> MutexGuard<'_, HashMap<usize, String>> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes a list while the kernel runs.
    fn dispatch_with(
        &self,
        launch: &Launch<'_>,
        list: Binding<'_>,
        change: impl FnOnce(&mut [u8]),
    ) -> Result<()> {
        let Binding { buffer, offset, .. } = list;
        let mut old = vec![0; buffer.len() - offset];
        self.gpu.read(buffer, offset, &mut old)?;
        let mut new = old.clone();
        change(&mut new);
        self.gpu.write(buffer, offset, &new)?;
        self.gpu.dispatch(launch)?;
        // Reading waits.
        self.gpu.read(buffer, offset, &mut new)?;
        self.gpu.write(buffer, offset, &old)
    }
}

impl Gpu for Altered {
    fn name(&self) -> &str {
        self.gpu.name()
    }

    fn class(&self) -> ChipClass {
        self.gpu.class()
    }

    fn working_set_bytes(&self) -> u64 {
        self.gpu.working_set_bytes()
    }

    fn dispatch_budget(&self) -> Duration {
        self.gpu.dispatch_budget()
    }

    fn allocate(&self, len: usize, placement: Placement) -> Result<GpuBuffer> {
        self.gpu.allocate(len, placement)
    }

    fn wrap(&self, bytes: &SharedBytes) -> Result<Option<(GpuBuffer, usize)>> {
        self.gpu.wrap(bytes)
    }

    fn pipeline(
        &self,
        library: &'static Library,
        function: &str,
        constants: &[Constant],
    ) -> Result<Pipeline> {
        let (mut other, mut constants) = (function.to_owned(), constants.to_vec());
        if function.starts_with(self.kernels) {
            match self.change {
                Change::Ending(right, wrong) => {
                    if let Some(rest) = function.strip_suffix(right) {
                        other = format!("{rest}{wrong}");
                    }
                }
                Change::Flag(flag) => {
                    for constant in &mut constants {
                        if let Constant::Bool(index, value) = constant
                            && *index == flag
                        {
                            *value = !*value;
                        }
                    }
                }
                Change::Number(change) => {
                    for constant in &mut constants {
                        if let Constant::U16(_, value) = constant {
                            *value = change(*value);
                        }
                    }
                }
                _ => {}
            }
        }
        let pipeline = self.gpu.pipeline(library, &other, &constants)?;
        self.names().insert(pipeline.index, function.to_owned());
        Ok(pipeline)
    }

    fn dispatch(&self, launch: &Launch<'_>) -> Result<()> {
        if !self.names()[&launch.pipeline.index].starts_with(self.kernels) {
            return self.gpu.dispatch(launch);
        }
        let mut args = launch.args.to_vec();
        let mut buffers = launch.buffers.to_vec();
        let mut wrong = *launch;
        match self.change {
            Change::Word(word, change) => {
                let bytes = args[4 * word..].first_chunk_mut().unwrap();
                *bytes = change(u32::from_ne_bytes(*bytes)).to_ne_bytes();
            }
            Change::Offset(buffer, change) => buffers[buffer - 1].offset = change(buffers[buffer - 1].offset),
            Change::Buffer(buffer, other) => {
                let access = buffers[buffer - 1].access;
                buffers[buffer - 1] = Binding { access, ..buffers[other - 1] };
            }
            Change::Declared(buffer, access) => buffers[buffer - 1].access = access,
            Change::Grid(dimension, change) => wrong.grid[dimension] = change(wrong.grid[dimension]).max(1),
            Change::Threads(change) => wrong.num_threads = change(wrong.num_threads).next_multiple_of(32),
            Change::Memory(change) => {
                wrong.threadgroup_memory = change(wrong.threadgroup_memory).next_multiple_of(16);
            }
            Change::List(buffer, [len, word], dimension, change) => {
                let num_records = launch.grid.get(dimension).copied().unwrap_or(usize::MAX);
                return self.dispatch_with(launch, buffers[buffer - 1], |list| {
                    for record in list.chunks_exact_mut(4 * len).take(num_records) {
                        let bytes = record[4 * word..].first_chunk_mut().unwrap();
                        *bytes = change(u32::from_ne_bytes(*bytes)).to_ne_bytes();
                    }
                });
            }
            Change::LeftOut => return Ok(()),
            Change::Flag(_) | Change::Number(_) | Change::Ending(..) | Change::NotWaitedFor => {}
        }
        self.gpu.dispatch(&Launch { args: &args, buffers: &buffers, ..wrong })
    }

    fn write(&self, target: &GpuBuffer, offset: usize, bytes: &[u8]) -> Result<()> {
        self.gpu.write(target, offset, bytes)
    }

    fn read(&self, source: &GpuBuffer, offset: usize, bytes: &mut [u8]) -> Result<()> {
        self.gpu.read(source, offset, bytes)
    }

    fn commit(&self) -> Result<Ticket> {
        self.gpu.commit()
    }

    fn wait(&self, ticket: Ticket) -> Result<()> {
        match self.change {
            Change::NotWaitedFor => Ok(()),
            _ => self.gpu.wait(ticket),
        }
    }
}
