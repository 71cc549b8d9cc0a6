//! Descriptors and graphs as tests write them.

use crate::support::{Gpu, P, cu};

pub const FLOAT: i32 = 0;
pub const HALF: i32 = 2;
pub const INT32: i32 = 4;
pub const BFLOAT16: i32 = 9;
pub const INT64: i32 = 10;
pub const BOOLEAN: i32 = 11;

pub const ADD: i32 = 0;
pub const MUL: i32 = 1;
pub const DIV: i32 = 6;
pub const SUB: i32 = 9;
pub const EXP: i32 = 13;
pub const LOG: i32 = 15;
pub const IDENTITY: i32 = 21;
pub const CMP_GT: i32 = 302;
pub const CMP_GE: i32 = 303;
pub const CMP_LT: i32 = 304;
pub const LOGICAL_AND: i32 = 400;
pub const GEN_INDEX: i32 = 501;
pub const SELECT: i32 = 601;

pub const REDUCE_ADD: i32 = 0;
pub const REDUCE_MAX: i32 = 3;

/// Types of attributes.
pub const TYPE_HANDLE: u32 = 0;
pub const TYPE_DATA: u32 = 1;
pub const TYPE_BOOL: u32 = 2;
pub const TYPE_I64: u32 = 3;
pub const TYPE_DOUBLE: u32 = 5;
pub const TYPE_POINTER: u32 = 6;
pub const TYPE_HEURISTIC: u32 = 8;
pub const TYPE_KNOB: u32 = 9;
pub const TYPE_POINTWISE: u32 = 14;
pub const TYPE_DESCRIPTOR: u32 = 15;
pub const TYPE_REDUCTION: u32 = 18;

pub struct Cudnn {
    pub gpu: Gpu,
    pub handle: P,
}

/// A tensor's descriptor, with what other descriptors need to know of it.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub descriptor: P,
    pub dims: Vec<i64>,
}

/// A tensor that is to be described.
#[derive(Clone)]
pub struct Spec<'a> {
    pub id: i64,
    pub dtype: i32,
    pub dims: &'a [i64],
    pub strides: &'a [i64],
    pub is_virtual: bool,
    pub is_by_value: bool,
    pub alignment: i64,
    pub ragged: Option<P>,
}

pub fn spec<'a>(id: i64, dtype: i32, dims: &'a [i64], strides: &'a [i64]) -> Spec<'a> {
    Spec { id, dtype, dims, strides, is_virtual: false, is_by_value: false, alignment: 16, ragged: None }
}

/// Strides of a tensor without gaps.
pub fn packed(dims: &[i64]) -> Vec<i64> {
    let mut strides = vec![1; dims.len()];
    for i in (1..dims.len()).rev() {
        strides[i - 1] = strides[i] * dims[i];
    }
    strides
}

impl Cudnn {
    pub fn new() -> Cudnn {
        Cudnn::with(&[])
    }

    pub fn with(settings: &[(&str, &str)]) -> Cudnn {
        let defaults = [("SOFTGPU_ARCH", "90"), ("SOFTGPU_CUDNN_REFUSE", ""), ("SOFTGPU_CUDNN_VERSION", "91901")];
        let gpu = Gpu::with(&[&defaults, settings].concat());
        let mut handle = std::ptr::null_mut();
        assert_eq!(cu!(gpu, cudnnCreate(&raw mut handle => *mut P)), 0);
        assert_eq!(cu!(gpu, cudnnSetStream(handle => P, gpu.stream => P)), 0);
        Cudnn { gpu, handle }
    }

    pub fn create(&self, kind: u32) -> P {
        let mut descriptor = std::ptr::null_mut();
        assert_eq!(cu!(self.gpu, cudnnBackendCreateDescriptor(kind => u32, &raw mut descriptor => *mut P)), 0);
        descriptor
    }

    pub fn set<T>(&self, of: P, name: u32, ty: u32, values: &[T]) -> u32 {
        let (n, at) = (values.len() as i64, values.as_ptr().cast_mut().cast());
        cu!(self.gpu, cudnnBackendSetAttribute(of => P, name => u32, ty => u32, n => i64, at => P))
    }

    pub fn finalize(&self, descriptor: P) -> u32 {
        cu!(self.gpu, cudnnBackendFinalize(descriptor => P))
    }

    /// Values of an attribute, at most `room`.
    pub fn get<T: Copy + Default>(&self, of: P, name: u32, ty: u32, room: usize) -> Result<Vec<T>, u32> {
        let (mut values, mut n) = (vec![T::default(); room], 0i64);
        let at = values.as_mut_ptr().cast();
        let code = cu!(self.gpu, cudnnBackendGetAttribute(of => P, name => u32, ty => u32, room as i64 => i64,
            &raw mut n => *mut i64, at => P));
        values.truncate(n as usize);
        if code == 0 { Ok(values) } else { Err(code) }
    }

    /// The sentence about the last refusal.
    pub fn last_error(&self) -> String {
        let mut text = [0u8; 512];
        type Last = unsafe extern "C" fn(*mut u8, usize);
        // SAFETY: the function's type.
        unsafe { (*self.gpu.symbol::<Last>("cudnnGetLastErrorString"))(text.as_mut_ptr(), text.len()) };
        String::from_utf8_lossy(&text).trim_end_matches('\0').to_owned()
    }

    /// A descriptor of a tensor, or why it is refused.
    pub fn try_tensor(&self, s: &Spec<'_>) -> Result<Tensor, u32> {
        let d = self.create(17);
        let mut codes = vec![
            self.set(d, 906, TYPE_I64, &[s.id]),
            self.set(d, 901, TYPE_DATA, &[s.dtype]),
            self.set(d, 902, TYPE_I64, s.dims),
            self.set(d, 903, TYPE_I64, s.strides),
            self.set(d, 900, TYPE_I64, &[s.alignment]),
            self.set(d, 907, TYPE_BOOL, &[s.is_virtual]),
            self.set(d, 908, TYPE_BOOL, &[s.is_by_value]),
        ];
        if let Some(offsets) = s.ragged {
            codes.push(self.set(d, 913, TYPE_DESCRIPTOR, &[offsets]));
        }
        codes.push(self.finalize(d));
        first_error(&codes).map(|()| Tensor { descriptor: d, dims: s.dims.to_vec() })
    }

    pub fn tensor(&self, s: &Spec<'_>) -> Tensor {
        self.try_tensor(s).unwrap_or_else(|code| panic!("tensor {}: {code} {}", s.id, self.last_error()))
    }

    /// A number of the host.
    pub fn scalar(&self, id: i64, dtype: i32) -> Tensor {
        self.tensor(&Spec { is_by_value: true, ..spec(id, dtype, &[1; 4], &[1; 4]) })
    }

    fn operation(&self, kind: u32, parts: &[(u32, P)]) -> Result<P, u32> {
        let d = self.create(kind);
        let mut codes: Vec<u32> = parts.iter().map(|(n, part)| self.set(d, *n, TYPE_DESCRIPTOR, &[*part])).collect();
        codes.push(self.finalize(d));
        first_error(&codes).map(|()| d)
    }

    /// `inputs` are x, b and the mask.
    pub fn try_pointwise(&self, mode: i32, axis: Option<i64>, inputs: &[&Tensor], y: &Tensor) -> Result<P, u32> {
        let rule = self.create(0);
        let mut codes = vec![self.set(rule, 0, TYPE_POINTWISE, &[mode]), self.set(rule, 1, TYPE_DATA, &[FLOAT])];
        if let Some(axis) = axis {
            codes.push(self.set(rule, 9, TYPE_I64, &[axis]));
        }
        codes.push(self.finalize(rule));
        first_error(&codes)?;
        let names = [751, 752, 758].into_iter();
        let parts: Vec<(u32, P)> = names.zip(inputs.iter().map(|t| t.descriptor)).collect();
        self.operation(13, &[&parts[..], &[(750, rule), (753, y.descriptor)]].concat())
    }

    /// `sizes` hold M, N and K of each batch.
    pub fn try_matmul(&self, a: &Tensor, b: &Tensor, c: &Tensor, sizes: [Option<&Tensor>; 3]) -> Result<P, u32> {
        let rule = self.create(18);
        let codes = [self.set(rule, 1500, TYPE_DATA, &[FLOAT]), self.set(rule, 1503, TYPE_DOUBLE, &[0f64])];
        first_error(&[codes[0], codes[1], self.finalize(rule)])?;
        let sizes = [1525, 1526, 1527].into_iter().zip(sizes).filter_map(|(n, s)| Some((n, s?.descriptor)));
        let parts = [(1520, a.descriptor), (1521, b.descriptor), (1522, c.descriptor), (1523, rule)];
        self.operation(19, &parts.into_iter().chain(sizes).collect::<Vec<_>>())
    }

    pub fn try_reduction(&self, operator: i32, x: &Tensor, y: &Tensor) -> Result<P, u32> {
        let rule = self.create(21);
        let codes = [self.set(rule, 1600, TYPE_REDUCTION, &[operator]), self.set(rule, 1601, TYPE_DATA, &[FLOAT])];
        first_error(&[codes[0], codes[1], self.finalize(rule)])?;
        self.operation(22, &[(1610, x.descriptor), (1611, y.descriptor), (1612, rule)])
    }

    pub fn try_reshape(&self, x: &Tensor, y: &Tensor) -> Result<P, u32> {
        self.operation(31, &[(2200, x.descriptor), (2201, y.descriptor)])
    }

    pub fn try_graph(&self, operations: &[P]) -> Result<P, u32> {
        let d = self.create(15);
        let codes = [self.set(d, 800, TYPE_HANDLE, &[self.handle]), self.set(d, 801, TYPE_DESCRIPTOR, operations)];
        first_error(&[codes[0], codes[1], self.finalize(d)]).map(|()| d)
    }

    /// Configurations that are proposed for a graph. There may be fewer than are announced.
    pub fn configs(&self, graph: P) -> Result<Vec<P>, u32> {
        let (heuristics, announced) = self.heuristics(graph)?;
        let mut configs: Vec<P> = (0..announced).map(|_| self.create(3)).collect();
        let (at, mut n) = (configs.as_mut_ptr().cast(), 0i64);
        let code = cu!(self.gpu, cudnnBackendGetAttribute(heuristics => P, 202 => u32, TYPE_DESCRIPTOR => u32,
            announced => i64, &raw mut n => *mut i64, at => P));
        assert_eq!(code, 0);
        configs.truncate(n as usize);
        Ok(configs)
    }

    /// The heuristics for a graph, and how many configurations they announce.
    pub fn heuristics(&self, graph: P) -> Result<(P, i64), u32> {
        let d = self.create(4);
        let codes =
            [self.set(d, 201, TYPE_DESCRIPTOR, &[graph]), self.set(d, 200, TYPE_HEURISTIC, &[3i32]), self.finalize(d)];
        first_error(&codes)?;
        let (mut n, null) = (0i64, std::ptr::null_mut());
        let code = cu!(self.gpu, cudnnBackendGetAttribute(d => P, 202 => u32, TYPE_DESCRIPTOR => u32, 0 => i64,
            &raw mut n => *mut i64, null => P));
        if code == 0 { Ok((d, n)) } else { Err(code) }
    }

    /// A configuration of an engine by its number, with knobs.
    pub fn config(&self, graph: P, index: i64, knobs: &[(i32, i64)]) -> Result<P, u32> {
        let (engine, config) = (self.create(2), self.create(3));
        let mut codes = vec![
            self.set(engine, 1300, TYPE_DESCRIPTOR, &[graph]),
            self.set(engine, 1301, TYPE_I64, &[index]),
            self.finalize(engine),
            self.set(config, 300, TYPE_DESCRIPTOR, &[engine]),
        ];
        let choices: Vec<P> = knobs.iter().map(|_| self.create(7)).collect();
        for ((knob, value), choice) in knobs.iter().zip(&choices) {
            codes.push(self.set(*choice, 600, TYPE_KNOB, &[*knob]));
            codes.push(self.set(*choice, 601, TYPE_I64, &[*value]));
            codes.push(self.finalize(*choice));
        }
        codes.extend([self.set(config, 302, TYPE_DESCRIPTOR, &choices), self.finalize(config)]);
        first_error(&codes).map(|()| config)
    }

    pub fn try_plan(&self, config: P) -> Result<P, u32> {
        let d = self.create(5);
        let codes = [
            self.set(d, 400, TYPE_HANDLE, &[self.handle]),
            self.set(d, 401, TYPE_DESCRIPTOR, &[config]),
            self.finalize(d),
        ];
        first_error(&codes).map(|()| d)
    }

    /// The first plan for a graph of operations.
    pub fn plan(&self, operations: &[P]) -> Result<P, u32> {
        self.try_plan(self.configs(self.try_graph(operations)?)?[0])
    }

    pub fn workspace_bytes(&self, plan: P) -> usize {
        self.get::<i64>(plan, 402, TYPE_I64, 1).unwrap()[0] as usize
    }

    pub fn pack(&self, pointers: &[(i64, u64)], workspace: u64) -> P {
        let d = self.create(16);
        let (ids, addresses): (Vec<i64>, Vec<u64>) = pointers.iter().copied().unzip();
        let codes = [
            self.set(d, 1000, TYPE_I64, &ids),
            self.set(d, 1001, TYPE_POINTER, &addresses),
            self.set(d, 1003, TYPE_POINTER, &[workspace]),
            self.finalize(d),
        ];
        assert_eq!(codes, [0; 4], "{}", self.last_error());
        d
    }

    pub fn execute(&self, plan: P, pointers: &[(i64, u64)], workspace: u64) -> u32 {
        cu!(self.gpu, cudnnBackendExecute(self.handle => P, plan => P, self.pack(pointers, workspace) => P))
    }

    /// Executes a plan with a workspace of its own and waits.
    pub fn run(&self, plan: P, pointers: &[(i64, u64)]) {
        let workspace = self.gpu.alloc(self.workspace_bytes(plan).max(16));
        assert_eq!(self.execute(plan, pointers, workspace), 0, "{}", self.last_error());
        self.gpu.sync();
    }
}

fn first_error(codes: &[u32]) -> Result<(), u32> {
    codes.iter().find(|c| **c != 0).map_or(Ok(()), |c| Err(*c))
}

/// Operations of a graph under construction, over virtual tensors of f32 unless told otherwise.
pub struct Graph<'a> {
    pub cudnn: &'a Cudnn,
    pub operations: Vec<P>,
    next: i64,
}

impl<'a> Graph<'a> {
    pub fn new(cudnn: &'a Cudnn) -> Graph<'a> {
        Graph { cudnn, operations: Vec::new(), next: 100 }
    }

    pub fn virtual_tensor(&mut self, dtype: i32, dims: &[i64], strides: &[i64]) -> Tensor {
        self.next += 1;
        self.cudnn.tensor(&Spec { is_virtual: true, ..spec(self.next, dtype, dims, strides) })
    }

    pub fn virtual_like(&mut self, dims: &[i64]) -> Tensor {
        self.virtual_tensor(FLOAT, dims, &packed(dims))
    }

    fn push(&mut self, operation: Result<P, u32>) {
        let error = self.cudnn.last_error();
        self.operations.push(operation.unwrap_or_else(|code| panic!("{code}: {error}")));
    }

    pub fn pointwise_to(&mut self, mode: i32, inputs: &[&Tensor], y: &Tensor) {
        self.push(self.cudnn.try_pointwise(mode, None, inputs, y));
    }

    /// Gives a virtual tensor of the first input's shape.
    pub fn pointwise(&mut self, mode: i32, inputs: &[&Tensor]) -> Tensor {
        let is_boolean = (300..=402).contains(&mode);
        let dims = &inputs[0].dims;
        let y = self.virtual_tensor(if is_boolean { BOOLEAN } else { FLOAT }, dims, &packed(dims));
        self.pointwise_to(mode, inputs, &y);
        y
    }

    pub fn index(&mut self, axis: i64, like: &Tensor) -> Tensor {
        let y = self.virtual_tensor(INT32, &like.dims, &packed(&like.dims));
        self.push(self.cudnn.try_pointwise(GEN_INDEX, Some(axis), &[like], &y));
        y
    }

    pub fn reduce_to(&mut self, operator: i32, x: &Tensor, y: &Tensor) {
        self.push(self.cudnn.try_reduction(operator, x, y));
    }

    pub fn matmul_to(&mut self, a: &Tensor, b: &Tensor, c: &Tensor, sizes: [Option<&Tensor>; 3]) {
        self.push(self.cudnn.try_matmul(a, b, c, sizes));
    }

    /// Rows and columns exchanged, rounded to `dtype`.
    pub fn transpose(&mut self, dtype: i32, x: &Tensor, strides: &[i64]) -> Tensor {
        let dims = [x.dims[0], x.dims[1], x.dims[3], x.dims[2]];
        let y = self.virtual_tensor(dtype, &dims, &[strides[0], strides[1], strides[3], strides[2]]);
        self.push(self.cudnn.try_reshape(x, &y));
        y
    }
}
