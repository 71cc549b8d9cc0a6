//! What is refused, when, and with which status.

use crate::attention::{Attention, documents, rows};
use crate::builder::*;
use crate::reference::Shape;
use crate::support::{P, cu};

const BAD_PARAM: u32 = 2000;
const NULL_POINTER: u32 = 2002;
const NOT_FINALIZED: u32 = 2004;
const ATTRIBUTE_TYPE: u32 = 2010;
const NOT_SUPPORTED: u32 = 3000;

/// How the configurations for a graph are refused: there are none.
fn is_refused(cudnn: &Cudnn, operations: &[P]) -> bool {
    cudnn.configs(cudnn.try_graph(operations).unwrap()).unwrap().iter().all(|c| cudnn.try_plan(*c).is_err())
}

/// The statuses of cuDNN 9.19.1, as its own library gave them for the same calls; 0-sized tensors it lets pass.
#[test]
fn tensors_are_checked_when_they_are_finalized() {
    let cudnn = Cudnn::new();
    let dims = [2, 4, 8, 16];
    let strides = packed(&dims);
    let good = spec(1, BFLOAT16, &dims, &strides);
    let wrong = [
        spec(1, BFLOAT16, &dims, &strides[1..]),
        spec(1, BFLOAT16, &dims, &[-1, 128, 16, 1]),
        spec(1, BFLOAT16, &[2, 0, 8, 16], &strides),
        spec(1, BFLOAT16, &[1; 9], &[1; 9]),
        Spec { alignment: 3, ..good.clone() },
        Spec { alignment: 1, ..good.clone() },
        Spec { is_by_value: true, ..good.clone() },
        Spec { is_by_value: true, is_virtual: true, ..spec(1, FLOAT, &[1; 4], &[1; 4]) },
    ];

    assert!(cudnn.try_tensor(&good).is_ok());
    for s in wrong {
        assert_eq!(cudnn.try_tensor(&s).err(), Some(BAD_PARAM), "{:?} {:?}", s.dims, s.strides);
    }
    let offsets = |n, dtype| cudnn.tensor(&spec(9, dtype, &[n, 1, 1, 1], &[1; 4])).descriptor;
    let ragged = |o| cudnn.try_tensor(&Spec { ragged: Some(o), ..good.clone() }).map(|_| ());
    let found =
        [ragged(offsets(3, INT32)), ragged(offsets(3, INT64)), ragged(offsets(2, INT64)), ragged(offsets(3, FLOAT))];
    assert_eq!(found, [Ok(()), Ok(()), Err(BAD_PARAM), Err(BAD_PARAM)]);
}

#[test]
fn attributes_are_checked_when_they_are_set_and_read() {
    let cudnn = Cudnn::new();
    let (unfinished, finished) = (cudnn.create(17), cudnn.tensor(&spec(1, FLOAT, &[2, 3], &[3, 1])).descriptor);
    let operation = cudnn.create(13);
    let (null, id) = (std::ptr::null_mut(), 7i64);

    let found = [
        cudnn.set(unfinished, 906, TYPE_I64, &[id, id]),
        cudnn.set(unfinished, 906, TYPE_DATA, &[4i32]),
        cudnn.set(unfinished, 0, TYPE_POINTWISE, &[4i32]),
        cudnn.set(finished, 906, TYPE_I64, &[id]),
        cudnn.set(null, 906, TYPE_I64, &[id]),
        cu!(cudnn.gpu, cudnnBackendSetAttribute(unfinished => P, 906 => u32, 3 => u32, 1 => i64, null => P)),
        cudnn.set(operation, 751, TYPE_DESCRIPTOR, &[unfinished]),
        cudnn.set(operation, 750, TYPE_DESCRIPTOR, &[finished]),
        cudnn.finalize(unfinished),
        cudnn.finalize(finished),
        cudnn.finalize(null),
        cudnn.finalize(operation),
    ];

    assert_eq!(
        found,
        [
            BAD_PARAM,
            ATTRIBUTE_TYPE,
            BAD_PARAM,
            BAD_PARAM,
            NULL_POINTER,
            BAD_PARAM,
            NOT_FINALIZED,
            BAD_PARAM,
            BAD_PARAM,
            BAD_PARAM,
            NULL_POINTER,
            BAD_PARAM
        ]
    );
    assert_eq!(cudnn.get::<i64>(finished, 902, TYPE_I64, 8), Ok(vec![2, 3]));
    assert_eq!(cudnn.get::<i64>(finished, 902, TYPE_I64, 1), Ok(vec![2]));
    assert_eq!(cudnn.get::<i64>(finished, 902, TYPE_DATA, 8), Err(ATTRIBUTE_TYPE));
    assert_eq!(cudnn.get::<i64>(unfinished, 906, TYPE_I64, 1), Err(1001));
}

#[test]
fn destroyed_descriptors_are_refused_and_counted() {
    let cudnn = Cudnn::new();
    let before = cudnn.gpu.stat("cudnn_descriptors");
    let d = cudnn.create(17);
    let destroy = || cu!(cudnn.gpu, cudnnBackendDestroyDescriptor(d => P));

    assert_eq!(cudnn.gpu.stat("cudnn_descriptors"), before + 1);
    assert_eq!((destroy(), destroy()), (0, BAD_PARAM));
    assert_eq!(cudnn.set(d, 906, TYPE_I64, &[1i64]), BAD_PARAM);
    assert_eq!(cudnn.gpu.stat("cudnn_descriptors"), before);
}

#[test]
fn shapes_that_do_not_agree_are_refused() {
    let cudnn = Cudnn::new();
    let of = |dims: &[i64]| cudnn.tensor(&spec(1, FLOAT, dims, &packed(dims)));
    let matmul = |a: &[i64], b: &[i64], c: &[i64]| cudnn.try_matmul(&of(a), &of(b), &of(c), [None; 3]).map(|_| ());
    let (a, b, c) = ([2, 4, 8, 16], [2, 2, 16, 5], [2, 4, 8, 5]);

    assert_eq!(matmul(&a, &b, &c), Ok(()));
    let found = [
        matmul(&a, &[2, 2, 15, 5], &c),
        matmul(&a, &[2, 3, 16, 5], &c),
        matmul(&a, &b, &[2, 4, 8, 6]),
        matmul(&a, &b, &[2, 2, 8, 5]),
        matmul(&a, &[2, 16, 5], &c),
    ];
    assert_eq!(found, [Err(BAD_PARAM); 5]);
    let pointwise = |inputs: &[&Tensor]| cudnn.try_pointwise(ADD, None, inputs, &of(&a)).map(|_| ());
    assert_eq!(pointwise(&[&of(&a), &of(&[1, 4, 1, 16])]), Ok(()));
    assert_eq!(pointwise(&[&of(&a), &of(&[2, 3, 8, 16])]), Err(BAD_PARAM));
    assert_eq!(pointwise(&[&of(&a)]), Err(BAD_PARAM));
    let reduce = |to: &[i64]| cudnn.try_reduction(REDUCE_ADD, &of(&a), &of(to)).map(|_| ());
    assert_eq!([reduce(&[2, 2, 8, 16]), reduce(&[2, 3, 8, 16])], [Ok(()), Err(BAD_PARAM)]);
    let reshape = |to: &[i64], s: &[i64]| cudnn.try_reshape(&of(&a), &cudnn.tensor(&spec(2, FLOAT, to, s))).map(|_| ());
    assert_eq!(reshape(&[2, 4, 16, 8], &[512, 128, 1, 16]), Ok(()));
    assert_eq!(reshape(&[2, 4, 16, 9], &[512, 128, 1, 16]), Err(BAD_PARAM));
    assert_eq!(reshape(&[2, 4, 16, 8], &[512, 128, 8, 1]), Err(NOT_SUPPORTED), "not a transpose");
    let sizes = cudnn.tensor(&spec(3, INT32, &[3, 1, 1, 1], &[1; 4]));
    let overridden = cudnn.try_matmul(&of(&a), &of(&b), &of(&c), [Some(&sizes), None, None]);
    assert_eq!(overridden, Err(NOT_SUPPORTED));
}

#[test]
fn graphs_that_contradict_themselves_are_refused() {
    let cudnn = Cudnn::new();
    let dims = [1, 1, 2, 2];
    let of = |id| cudnn.tensor(&spec(id, FLOAT, &dims, &packed(&dims)));
    let virtual_of = |id| cudnn.tensor(&Spec { is_virtual: true, ..spec(id, FLOAT, &dims, &packed(&dims)) });
    let exp = |x: &Tensor, y: &Tensor| cudnn.try_pointwise(EXP, None, &[x], y).unwrap();
    let graph = |operations: &[P]| cudnn.try_graph(operations).map(|_| ());
    let (x, y, z, v, w) = (of(1), of(2), of(3), virtual_of(4), virtual_of(5));

    assert_eq!(graph(&[exp(&x, &v), exp(&v, &y)]), Ok(()));
    assert_eq!(graph(&[exp(&v, &y)]), Err(BAD_PARAM), "no producer");
    assert_eq!(graph(&[exp(&x, &y), exp(&x, &v)]), Err(BAD_PARAM), "no consumer");
    assert_eq!(graph(&[exp(&x, &y), exp(&z, &y)]), Err(BAD_PARAM), "two producers");
    assert_eq!(graph(&[exp(&v, &w), exp(&w, &v), exp(&v, &y)]), Err(BAD_PARAM), "a circle");
    assert_eq!(graph(&[exp(&x, &v), exp(&virtual_of(1), &y)]), Err(2009), "one id for two tensors");
}

#[test]
fn graphs_without_an_engine_get_no_configurations() {
    let cudnn = Cudnn::new();
    let mut shapes = vec![rows(1, 2, 2, 32, 16)];
    shapes.push(Shape { width: 20, ..shapes[0].clone() });
    shapes.push(Shape { width: 264, ..shapes[0].clone() });

    let found: Vec<bool> = shapes.iter().map(|s| is_refused(&cudnn, &Attention::new(&cudnn, s).forward())).collect();

    assert_eq!(found, [false, true, true]);
    let mut attention = Attention::new(&cudnn, &shapes[0]);
    attention.dtype = FLOAT;
    assert!(is_refused(&cudnn, &attention.forward()));
    assert!(cudnn.last_error().contains("HALF or BFLOAT16"), "{}", cudnn.last_error());
    let without_sum = &Attention::new(&cudnn, &shapes[0]).backward()[3..];
    assert!(is_refused(&cudnn, without_sum));
    // As cuDNN 9.19, which announces more configurations than it gives.
    let graph = cudnn.try_graph(without_sum).unwrap();
    assert_eq!((cudnn.heuristics(graph).unwrap().1, cudnn.configs(graph).unwrap().len()), (8, 0));
}

/// cuDNN takes these and computes wrong gradients.
#[test]
fn workspaces_and_statistics_of_other_strides_are_refused() {
    let cudnn = Cudnn::new();
    let shape = rows(1, 2, 2, 32, 16);
    let mut attention = Attention::new(&cudnn, &shape);
    attention.is_deterministic = false;
    let refused = |a: &Attention<'_>| is_refused(&cudnn, &a.backward());

    assert!(!refused(&attention));
    attention.accumulator_strides = Some([1024, 16, 32, 1]);
    assert!(refused(&attention));
    attention.accumulator_strides = None;
    attention.sum_strides = Some([64, 1, 2, 1]);
    assert!(refused(&attention));
    attention.sum_strides = None;
    attention.statistics_strides = Some([64, 1, 2, 1]);
    assert!(refused(&attention));
}

#[test]
fn documents_have_no_backward_pass_on_sm_80() {
    let shape = documents(&[8, 5], 0, 2, 2, 16);
    for (arch, expected) in [("80", true), ("90", false), ("120", true)] {
        let cudnn = Cudnn::with(&[("SOFTGPU_ARCH", arch)]);
        let attention = Attention::new(&cudnn, &shape);

        assert!(!is_refused(&cudnn, &attention.forward()));
        assert_eq!(is_refused(&cudnn, &attention.backward()), expected, "{arch}");
    }
}

#[test]
fn settings_refuse_graphs_and_first_engines() {
    let shape = rows(1, 2, 2, 32, 16);
    for (setting, expected) in
        [("forward", [true, false]), ("backward", [false, true]), ("forward,backward", [true; 2])]
    {
        let cudnn = Cudnn::with(&[("SOFTGPU_CUDNN_REFUSE", setting)]);
        let attention = Attention::new(&cudnn, &shape);

        assert_eq!([attention.forward(), attention.backward()].map(|g| is_refused(&cudnn, &g)), expected, "{setting}");
    }
    let cudnn = Cudnn::with(&[("SOFTGPU_CUDNN_REFUSE", "first")]);
    let configs = cudnn.configs(cudnn.try_graph(&Attention::new(&cudnn, &shape).forward()).unwrap()).unwrap();
    let plans: Vec<Result<(), u32>> = configs.iter().map(|c| cudnn.try_plan(*c).map(|_| ())).collect();
    assert_eq!(plans, [Err(NOT_SUPPORTED), Ok(())]);
}

#[test]
fn errors_have_names_and_the_last_sentence_is_given_once() {
    let cudnn = Cudnn::new();
    type Name = unsafe extern "C" fn(u32) -> *const std::ffi::c_char;
    // SAFETY: the function's type; its results are strings that live as long as the library.
    let name = |code| unsafe {
        let name = (*cudnn.gpu.symbol::<Name>("cudnnGetErrorString"))(code);
        std::ffi::CStr::from_ptr(name).to_str().unwrap()
    };

    assert_eq!(
        [name(0), name(3000), name(7)],
        ["CUDNN_STATUS_SUCCESS", "CUDNN_STATUS_NOT_SUPPORTED", "CUDNN_UNKNOWN_STATUS"]
    );
    let reshaped = cudnn.finalize(cudnn.create(17));
    assert_eq!(
        (reshaped, cudnn.last_error().as_str(), cudnn.last_error().as_str()),
        (BAD_PARAM, "attribute 906 is missing", "")
    );
}
