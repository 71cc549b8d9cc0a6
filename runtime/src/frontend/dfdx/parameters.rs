//! Reads and writes the tensors of a dfdx module as a parameter table, and reads their gradients.

use crate::frontend::UserParam;
use dfdx::nn::tensor_collection::{
    RecursiveWalker, TensorCollection, TensorOptions, TensorVisitor, ViewTensorMut, ViewTensorName, ViewTensorRef,
};
use dfdx::prelude::{Cpu, CpuError, Gradients, ReshapeTo, Shape, Tensor};
use rayon::prelude::*;

/// Elements of one task of a copy: some microseconds of work.
const CHUNK: usize = 1 << 14;

/// The table of a module. Makes every tensor row-major first, so that later copies are plain; a tensor without dims
/// becomes a tensor of one element.
pub(super) fn table<M: TensorCollection<f32, Cpu>>(module: &mut M) -> Result<Vec<UserParam>, CpuError> {
    let mut f = Table { params: Vec::new() };
    M::iter_tensors(&mut RecursiveWalker { m: (module, String::new()), f: &mut f })?;
    Ok(f.params)
}

struct Table {
    params: Vec<UserParam>,
}

impl TensorVisitor<f32, Cpu> for Table {
    type Viewer = (ViewTensorMut, ViewTensorName);
    type Err = CpuError;
    type E2 = f32;
    type D2 = Cpu;

    fn visit<S: Shape>(
        &mut self,
        options: TensorOptions<S, f32, Cpu>,
        (tensor, name): (&mut Tensor<S, f32, Cpu>, String),
    ) -> Result<Option<Tensor<S, f32, Cpu>>, CpuError> {
        *tensor = tensor.clone().try_contiguous()?;
        let mut shape: Vec<usize> = tensor_shape(tensor);
        if shape.is_empty() {
            shape.push(1);
        }
        // A module that is one bare tensor has no field name.
        let name = if name.is_empty() { "weight".into() } else { name };
        self.params.push(UserParam { name, shape, trainable: options.do_gradient_update, values: tensor.as_vec() });
        Ok(None)
    }
}

fn tensor_shape<S: Shape>(tensor: &Tensor<S, f32, Cpu>) -> Vec<usize> {
    use dfdx::prelude::HasShape;
    tensor.shape().concrete().into()
}

/// Overwrites the trained tensors of a module, in table order.
pub(super) fn write<M: TensorCollection<f32, Cpu>>(module: &mut M, params: &[&[f32]]) -> Result<(), CpuError> {
    M::iter_tensors(&mut RecursiveWalker { m: module, f: &mut Write { params: params.iter() } })?;
    Ok(())
}

struct Write<'a> {
    params: std::slice::Iter<'a, &'a [f32]>,
}

impl TensorVisitor<f32, Cpu> for Write<'_> {
    type Viewer = ViewTensorMut;
    type Err = CpuError;
    type E2 = f32;
    type D2 = Cpu;

    fn visit<S: Shape>(
        &mut self,
        options: TensorOptions<S, f32, Cpu>,
        tensor: &mut Tensor<S, f32, Cpu>,
    ) -> Result<Option<Tensor<S, f32, Cpu>>, CpuError> {
        if options.do_gradient_update {
            tensor.copy_from(self.params.next().expect("the table lists every trained tensor"));
        }
        Ok(None)
    }
}

/// Writes `scale` times the gradient of each trained tensor to `out`, or adds it to `out`. A tensor that the loss does
/// not depend on has a gradient of zero.
pub(super) fn read_gradients<M: TensorCollection<f32, Cpu>>(
    module: &M,
    gradients: &mut Gradients<f32, Cpu>,
    scale: f32,
    out: &mut [&mut [f32]],
    accumulate: bool,
) -> Result<(), CpuError> {
    let mut f = ReadGradients { gradients, scale, out: out.iter_mut(), accumulate };
    M::iter_tensors(&mut RecursiveWalker { m: module, f: &mut f })?;
    Ok(())
}

struct ReadGradients<'a, 'b> {
    gradients: &'a mut Gradients<f32, Cpu>,
    scale: f32,
    out: std::slice::IterMut<'a, &'b mut [f32]>,
    accumulate: bool,
}

impl TensorVisitor<f32, Cpu> for ReadGradients<'_, '_> {
    type Viewer = ViewTensorRef;
    type Err = CpuError;
    type E2 = f32;
    type D2 = Cpu;

    fn visit<S: Shape>(
        &mut self,
        options: TensorOptions<S, f32, Cpu>,
        tensor: &Tensor<S, f32, Cpu>,
    ) -> Result<Option<Tensor<S, f32, Cpu>>, CpuError> {
        if options.do_gradient_update {
            let out = self.out.next().expect("the table lists every trained tensor");
            let gradient: &[f32] = self.gradients.get_or_alloc_mut(tensor)?;
            let (scale, accumulate) = (self.scale, self.accumulate);
            out.par_chunks_mut(CHUNK).zip(gradient.par_chunks(CHUNK)).for_each(|(out, gradient)| {
                for (out, g) in out.iter_mut().zip(gradient) {
                    *out = if accumulate { *out + scale * g } else { scale * g };
                }
            });
        }
        Ok(None)
    }
}
