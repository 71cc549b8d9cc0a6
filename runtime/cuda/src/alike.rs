//! Equal arithmetic at all ranks: members of a group have the same model of GPU and the same versions of the driver, NVRTC,
//! cuBLASLt and cuDNN.
//!
//! The algorithm that the library proposes first for a product is a function of the GPU, of the library's version and of the product. So
//! ranks that have the first two in common have the same one, after every restart too; programs whose bits matter to other ranks use it
//! (`product::Choice`). The alternative, algorithms that
//! one rank chooses and sends to the others, would make a world wait until that rank has lowered its programs, and other models
//! of GPUs could not run them.

use crate::cudnn::Cudnn;
use crate::gpu::Gpu;
use phalanx_device::descriptor::digest;
use phalanx_device::{Collective, CollectiveError, SliceOperations};

/// Words that a member sends: a digest of its text, and as much of the text as there is room for.
const WORDS: usize = 66;
/// Words of the digest.
const DIGEST_WORDS: usize = 2;

/// What decides the algorithms of a GPU's products.
pub(crate) fn arithmetic_of(gpu: &Gpu, cudnn: Option<&Cudnn>) -> String {
    // SAFETY: a call without arguments.
    let version = unsafe { (gpu.libraries.blas.cublasLtGetVersion)() };
    let (mut major, mut minor) = (0, 0);
    // SAFETY: pointers to locals.
    unsafe { (gpu.libraries.nvrtc.nvrtcVersion)(&raw mut major, &raw mut minor) };
    let cudnn = cudnn.map_or_else(|| "no cuDNN".to_owned(), |cudnn| format!("cuDNN {}", cudnn.version()));
    let driver = gpu.libraries.driver.version();
    format!("{}, a driver for CUDA {driver}, NVRTC {major}.{minor}, cuBLASLt {version} and {cudnn}", gpu.model)
}

/// Compares what the members of a group have, in one small collective.
///
/// # Errors
/// Those of the communicator; [`CollectiveError::Library`] names two members that differ.
pub(crate) fn check_alike(own: &str, host: &mut dyn Collective) -> Result<(), CollectiveError> {
    let mut bytes = [0u8; 4 * WORDS];
    let (digest_bytes, text_bytes) = bytes.split_at_mut(4 * DIGEST_WORDS);
    digest_bytes.copy_from_slice(&digest(own.bytes().map(u64::from)).to_le_bytes());
    let len = own.len().min(text_bytes.len());
    text_bytes[..len].copy_from_slice(&own.as_bytes()[..len]);
    let words: [i32; WORDS] = std::array::from_fn(|i| i32::from_le_bytes(std::array::from_fn(|b| bytes[4 * i + b])));
    let mut all = vec![0; WORDS * host.size() as usize];
    host.all_gather(&words, &mut all, WORDS)?;
    let Some(other) = all.chunks(WORDS).position(|words| *words != all[..WORDS]) else { return Ok(()) };
    let text = |i: usize| {
        let bytes: Vec<u8> =
            all[WORDS * i + DIGEST_WORDS..WORDS * (i + 1)].iter().flat_map(|word| word.to_le_bytes()).collect();
        String::from_utf8_lossy(&bytes).trim_end_matches('\0').to_owned()
    };
    let reason = format!(
        "position 0 has {} and position {other} has {}: all GPU ranks of a world need the same, because their results would \
         have different bits",
        text(0),
        text(other)
    );
    Err(CollectiveError::Library { call: "comparing GPUs", reason })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::library::{Dnn, Search};
    use phalanx_collective::local::LocalWorld;
    use phalanx_device::world::World;
    use phalanx_device::world_id::WorldId;

    fn outcomes(arithmetic: [&str; 3]) -> Vec<Result<(), CollectiveError>> {
        let local = LocalWorld::new(World::of_one_group(WorldId { job: 1, generation: 1, incarnation: 1 }, 3).unwrap());
        let check = |rank: u32| check_alike(arithmetic[rank as usize], &mut local.communicator(0, rank).unwrap());
        std::thread::scope(|scope| {
            let check = &check;
            let threads = [0, 1, 2].map(|rank| scope.spawn(move || check(rank)));
            threads.map(|thread| thread.join().unwrap()).into()
        })
    }

    #[test]
    fn arithmetic_of_a_gpu_names_its_model_and_the_versions_of_all_libraries_that_compute() {
        let installation = phalanx_softgpu::Installation::new().unwrap();
        let search = Search::only(vec![installation.dir().to_owned()]);
        let gpu = Gpu::open(&search, 0).unwrap();
        let cudnn = Cudnn::open(&gpu, Dnn::find(&search).unwrap()).unwrap();

        let text = arithmetic_of(&gpu, Some(&cudnn));

        let parts = ["softgpu sm_90 with 132 multiprocessors", "CUDA 13.0", "NVRTC 13.0", "cuBLASLt 1", "cuDNN 91901"];
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
        assert!(arithmetic_of(&gpu, None).ends_with("no cuDNN"));
    }

    #[test]
    fn group_of_equal_gpus_and_libraries_is_accepted() {
        assert_eq!(outcomes(["NVIDIA H100 and cuBLASLt 130100"; 3]), [Ok(()), Ok(()), Ok(())]);
    }

    #[test]
    fn texts_that_differ_at_their_end_only_are_told_apart() {
        let text =
            |version| format!("{} and cuDNN {version}", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition ".repeat(8));

        let outcomes = outcomes([&text(91_900), &text(91_900), &text(91_901)]);

        assert!(outcomes.iter().all(Result::is_err), "{outcomes:?}");
    }

    #[test]
    fn group_with_another_gpu_or_library_is_refused_by_all_and_both_are_named() {
        let h100 = "NVIDIA H100 and cuBLASLt 130100";
        for other in ["NVIDIA H200 and cuBLASLt 130100", "NVIDIA H100 and cuBLASLt 120803"] {
            for outcome in outcomes([h100, h100, other]) {
                let text = outcome.unwrap_err().to_string();
                let names = [format!("position 0 has {h100} "), format!("position 2 has {other}:")];
                assert!(names.iter().all(|name| text.contains(name)), "{text}");
            }
        }
    }
}
