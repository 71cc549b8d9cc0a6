//! One instruction with its operands, run on two devices.

use anyhow::{Result, bail};
use half::{bf16, f16};
use phalanx_device::e4m3;
use phalanx_device::groups::Groups;
use phalanx_device::{Backing, Device, Machine};
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::mesh::MeshRank;
use phalanx_strategies::passes::commit::StepPhases;
use phalanx_strategies::passes::memory::memory;
use phalanx_strategies::program::{DType, Kind, Op, Phase, Program, Site, ValueId, op};

/// An operand and its elements.
#[derive(Clone, Debug)]
pub struct Operand {
    /// Its dims.
    pub shape: Vec<usize>,
    /// Its element type.
    pub dtype: DType,
    /// Its elements, before rounding to the element type.
    pub elements: Vec<f64>,
}

/// The nearest number of a type: what is derived from an operand must be derived from the numbers that machines see.
fn rounded(dtype: DType, x: f64) -> f64 {
    match dtype {
        DType::Bf16 => bf16::from_f64(x).to_f64(),
        DType::F16 => f16::from_f64(x).to_f64(),
        DType::F32 => f64::from(x as f32),
        DType::F64 | DType::I32 => x,
        DType::E4m3 => f64::from(e4m3::decode(e4m3::encode(x as f32))),
    }
}

impl Operand {
    /// Normally distributed elements, the same ones for the same seed.
    pub fn random(shape: &[usize], dtype: DType, seed: u64) -> Operand {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut uniform = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 11) as f64 / (1u64 << 53) as f64
        };
        let n = shape.iter().product();
        let mut normal = || (-2.0 * uniform().max(1e-300).ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos();
        Operand { shape: shape.to_vec(), dtype, elements: (0..n).map(|_| rounded(dtype, normal())).collect() }
    }

    /// These elements.
    ///
    /// # Panics
    /// If their number does not fit the shape.
    pub fn of(shape: &[usize], dtype: DType, elements: Vec<f64>) -> Operand {
        assert_eq!(shape.iter().product::<usize>(), elements.len());
        Operand { shape: shape.to_vec(), dtype, elements }
    }

    /// The same operand with every element rounded to its type.
    #[must_use]
    pub fn rounded(self) -> Operand {
        let dtype = self.dtype;
        self.map(|x| rounded(dtype, x))
    }

    /// The same operand with every element replaced.
    #[must_use]
    pub fn map(self, f: impl Fn(f64) -> f64) -> Operand {
        Operand { elements: self.elements.into_iter().map(f).collect(), ..self }
    }
}

/// The largest permitted difference of a result `x` from the reference `y`: `absolute + relative |y|`. A result whose type has
/// fewer bits may also differ by the rounding of its type.
#[derive(Clone, Copy, Debug)]
pub struct Tolerance {
    /// Absolute part.
    pub absolute: f64,
    /// Relative part.
    pub relative: f64,
}

impl Tolerance {
    /// The same bits.
    pub const EXACT: Tolerance = Tolerance { absolute: 0.0, relative: 0.0 };

    /// The same relative and absolute part.
    pub const fn of(both: f64) -> Tolerance {
        Tolerance { absolute: both, relative: both }
    }

    /// Whether the same bits are required.
    pub fn is_exact(self) -> bool {
        self.absolute == 0.0 && self.relative == 0.0
    }
}

/// One instruction.
#[derive(Clone, Debug)]
pub struct Case {
    /// Its name in reports.
    pub name: String,
    /// The operation.
    pub op: Op,
    /// Its operands.
    pub reads: Vec<Operand>,
    /// Shapes and types of its results.
    pub writes: Vec<(Vec<usize>, DType)>,
    /// Results that are operands, updated in place: `(read, write)`. Others of `Op::in_place_pairs` are also run with the
    /// operand's memory reused, if [`Case::run`] is told so.
    pub in_place: Vec<(usize, usize)>,
    /// How far results may differ.
    pub tolerance: Tolerance,
    /// The same where results reuse operands' memory.
    pub reused_tolerance: Tolerance,
    /// The mesh of the rank, for operations that depend on it.
    pub mesh_rank: MeshRank,
    /// The operand that is a split weight on devices that have them: [`Program::split`].
    pub split: Option<usize>,
}

impl Case {
    /// A case without results in place, on a mesh of one rank.
    pub fn new(name: impl Into<String>, op: Op, reads: Vec<Operand>, tolerance: Tolerance) -> Case {
        let (writes, in_place) = (Vec::new(), Vec::new());
        let (reused_tolerance, mesh_rank, split) = (tolerance, MeshRank::default(), None);
        Case { name: name.into(), op, reads, writes, in_place, tolerance, reused_tolerance, mesh_rank, split }
    }

    /// The case with one more result.
    #[must_use]
    pub fn writing(mut self, shape: &[usize], dtype: DType) -> Case {
        self.writes.push((shape.to_vec(), dtype));
        self
    }

    /// The case with one more result, which is operand `read`, updated in place.
    #[must_use]
    pub fn updating(mut self, read: usize) -> Case {
        self.in_place.push((read, self.writes.len()));
        let Operand { shape, dtype, .. } = &self.reads[read];
        self.writes.push((shape.clone(), *dtype));
        self
    }

    /// The case with an operand that is a split weight.
    #[must_use]
    pub fn splitting(self, read: usize) -> Case {
        Case { name: format!("{}, split", self.name), split: Some(read), ..self }
    }

    /// The program with the instruction; also the values that hold its operands and its results. With `reuses`, operands that a
    /// result may overwrite are activations that die with the instruction, so that the memory pass overlaps the two.
    pub fn program(&self, reuses: bool) -> (Program, Vec<ValueId>, Vec<ValueId>) {
        let mut p = Program { mesh_rank: self.mesh_rank, ..Program::default() };
        let is_updated = |i: usize| self.in_place.iter().any(|(read, _)| *read == i);
        let is_weight = |i: usize| is_updated(i) || self.split == Some(i);
        let kind = |i: usize| if is_weight(i) { Kind::Parameter } else { Kind::Constant };
        let add = |p: &mut Program, i: usize, o: &Operand| p.add_value(format!("given{i}"), &o.shape, o.dtype, kind(i));
        let given: Vec<ValueId> = self.reads.iter().enumerate().map(|(i, o)| add(&mut p, i, o)).collect();
        let site = Site { phase: Phase::Forward, block: None, microbatch: 0 };
        let mut reads = given.clone();
        for (i, _) in self.op.in_place_pairs(reads.len()).into_iter().filter(|(i, _)| reuses && !is_updated(*i)) {
            let Operand { shape, dtype, .. } = &self.reads[i];
            reads[i] = p.add_value(format!("read{i}"), shape, *dtype, Kind::Activation);
            let copy = if *dtype == DType::F64 { Op::Sum(op::Sum) } else { Op::Cast(op::Cast) };
            p.push(copy, vec![given[i]], vec![reads[i]], site);
        }
        let write = |(i, (shape, dtype)): (usize, &(Vec<usize>, DType))| {
            let place = self.in_place.iter().find(|(_, write)| *write == i);
            place
                .map_or_else(|| p.add_value(format!("write{i}"), shape, *dtype, Kind::Output), |(read, _)| reads[*read])
        };
        let writes: Vec<ValueId> = self.writes.iter().enumerate().map(write).collect();
        p.push(self.op.clone(), reads, writes.clone(), site);
        if let Some(weight) = self.split.map(|read| given[read]) {
            p.split(weight);
        }
        (p, given, writes)
    }

    /// Runs the instruction on a device; returns the elements of every result.
    ///
    /// # Errors
    /// What the device reports.
    pub fn run(&self, device: &dyn Device, reuses: bool) -> Result<Vec<Vec<f64>>> {
        let (program, given, writes) = self.program(reuses);
        let layout = memory(&program, device.target());
        let c = Compiled::new(program, layout, StepPhases { apply: 0, gather: 0, end: 1 });
        device.on_device_thread(1, || {
            let mut machine = device.machine(&[&c], &Backing::default())?;
            for (v, operand) in given.iter().zip(&self.reads) {
                put(&mut *machine, &c, *v, operand);
            }
            machine.run_all(&c, &mut Groups::none())?;
            machine.settle()?;
            Ok(writes.iter().map(|v| get(&*machine, &c, *v)).collect())
        })?
    }

    /// Runs the instruction on both devices, with and without reuse of operands' memory, and compares all results. Returns
    /// the largest difference relative to the tolerance.
    ///
    /// # Errors
    /// Names the first element that differs by more than the tolerance.
    pub fn compare(&self, reference: &dyn Device, device: &dyn Device) -> Result<f64> {
        let expected = self.run(reference, false)?;
        let mut worst: f64 = 0.0;
        for (reuses, tolerance) in [(false, self.tolerance), (true, self.reused_tolerance)] {
            let found = self.run(device, reuses)?;
            for (i, (expected, found)) in expected.iter().zip(&found).enumerate() {
                let (shape, dtype) = &self.writes[i];
                let allowed =
                    |y: f64| tolerance.absolute + (tolerance.relative + rounding(*dtype, tolerance)) * y.abs();
                let agrees =
                    |(y, x): &(&f64, &f64)| x == y || (x.is_nan() && y.is_nan()) || (**x - **y).abs() <= allowed(**y);
                let pairs = || expected.iter().zip(found);
                if let Some((j, (y, x))) = pairs().enumerate().find(|(_, pair)| !agrees(pair)) {
                    bail!(
                        "{}{}: result {i} {shape:?} {dtype}, element {j}: {x} on {}, {y} on {}; at most {:.3e} apart; {} of \
                         {} elements differ",
                        self.name,
                        if reuses { ", operands reused" } else { "" },
                        device.name(),
                        reference.name(),
                        allowed(*y),
                        pairs().filter(|pair| !agrees(pair)).count(),
                        expected.len(),
                    );
                }
                let shares = pairs().filter(|(y, x)| allowed(**y) > 0.0 && x.is_finite());
                worst = shares.map(|(y, x)| (x - y).abs() / allowed(*y)).fold(worst, f64::max);
            }
        }
        Ok(worst)
    }
}

/// The unit roundoff of a narrow type, unless the same bits are required.
fn rounding(dtype: DType, tolerance: Tolerance) -> f64 {
    if tolerance.is_exact() {
        return 0.0;
    }
    match dtype {
        // Two roundings that differ are one unit in the last place apart.
        DType::Bf16 => 1.0 / 128.0,
        DType::F16 => 1.0 / 1024.0,
        DType::F32 | DType::F64 | DType::I32 | DType::E4m3 => 0.0,
    }
}

fn put(machine: &mut dyn Machine, c: &Compiled, v: ValueId, operand: &Operand) {
    let elements = &operand.elements;
    match operand.dtype {
        DType::F32 => machine.write(c, v, 0, &elements.iter().map(|x| *x as f32).collect::<Vec<_>>()),
        DType::Bf16 => machine.write(c, v, 0, &elements.iter().map(|x| bf16::from_f64(*x)).collect::<Vec<_>>()),
        DType::F16 => machine.write(c, v, 0, &elements.iter().map(|x| f16::from_f64(*x)).collect::<Vec<_>>()),
        DType::F64 => machine.write(c, v, 0, elements),
        DType::I32 => machine.write(c, v, 0, &elements.iter().map(|x| *x as i32).collect::<Vec<_>>()),
        DType::E4m3 => machine.write(c, v, 0, &elements.iter().map(|x| e4m3::encode(*x as f32)).collect::<Vec<_>>()),
    }
}

fn get(machine: &dyn Machine, c: &Compiled, v: ValueId) -> Vec<f64> {
    match c.program.value(v).dtype {
        DType::F32 => machine.read::<f32>(c, v).into_iter().map(f64::from).collect(),
        DType::Bf16 => machine.read::<bf16>(c, v).into_iter().map(f64::from).collect(),
        DType::F16 => machine.read::<f16>(c, v).into_iter().map(f64::from).collect(),
        DType::F64 => machine.read::<f64>(c, v),
        DType::I32 => machine.read::<i32>(c, v).into_iter().map(f64::from).collect(),
        DType::E4m3 => machine.read::<u8>(c, v).into_iter().map(|bits| f64::from(e4m3::decode(bits))).collect(),
    }
}
