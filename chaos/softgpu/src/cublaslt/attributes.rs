//! Descriptors and their attributes.

use super::{Element, INVALID_VALUE, NOT_SUPPORTED, Outcome, Status, refuse};

/// Something with attributes by number, each of some bytes.
pub trait Attributes {
    fn set(&mut self, attribute: u32, value: &[u8]) -> Outcome;
    fn get(&self, attribute: u32) -> Option<Vec<u8>>;
}

/// What is computed.
#[derive(Clone, Debug)]
pub struct Description {
    pub compute: u32,
    pub scale: u32,
    pub transposes: [bool; 2],
    pub epilogue: u32,
    pub bias: usize,
    pub bias_stride: i64,
    pub bias_type: Option<Element>,
    /// Of A and B: the scales, and a `cublasLtMatmulMatrixScale_t`.
    pub scales: [usize; 2],
    pub scale_modes: [u32; 2],
    pub is_fast: bool,
}

/// How a matrix lies in memory.
#[derive(Clone, Debug)]
pub struct Layout {
    pub element: Element,
    pub is_by_rows: bool,
    pub rows: usize,
    pub cols: usize,
    pub ld: i64,
    pub batches: i32,
    pub stride: i64,
}

/// What an algorithm may use.
#[derive(Clone, Debug)]
pub struct Preference {
    pub workspace_most: u64,
    pub reduction_schemes: u32,
    /// Of A, B, C and D, in bytes.
    pub alignments: [u32; 4],
}

const COMPUTE_16F: u32 = 64;
const COMPUTE_TYPES: [u32; 8] = [COMPUTE_16F, 65, 68, 69, 74, 75, 77, 78];

fn number<const N: usize>(value: &[u8]) -> Result<[u8; N], Status> {
    value.try_into().map_err(|_| INVALID_VALUE)
}

fn as_u32(value: &[u8]) -> Result<u32, Status> {
    Ok(u32::from_ne_bytes(number(value)?))
}

fn as_u64(value: &[u8]) -> Result<u64, Status> {
    Ok(u64::from_ne_bytes(number(value)?))
}

fn bytes_of(value: u32) -> Vec<u8> {
    value.to_ne_bytes().into()
}

fn element(dtype: u32) -> Result<Element, Status> {
    Element::of(dtype).ok_or_else(|| refuse(NOT_SUPPORTED, format_args!("elements of type {dtype}")))
}

impl Description {
    pub fn new(compute: u32, scale: u32) -> Result<Description, Status> {
        let is_half = [COMPUTE_16F, 65].contains(&compute);
        if !COMPUTE_TYPES.contains(&compute) || scale != if is_half { 2 } else { 0 } {
            return Err(refuse(NOT_SUPPORTED, format_args!("compute type {compute} with scale type {scale}")));
        }
        let transposes = [false; 2];
        let (epilogue, bias, bias_stride, bias_type) = (1, 0, 0, None);
        let (scales, scale_modes, is_fast) = ([0; 2], [0; 2], false);
        Ok(Description {
            compute,
            scale,
            transposes,
            epilogue,
            bias,
            bias_stride,
            bias_type,
            scales,
            scale_modes,
            is_fast,
        })
    }

    pub fn has_bias(&self) -> bool {
        self.epilogue & 4 != 0
    }

    pub fn has_relu(&self) -> bool {
        self.epilogue & 2 != 0
    }
}

fn transposes(value: &[u8]) -> Result<bool, Status> {
    // 2 is the conjugate transpose, the same for real numbers.
    match as_u32(value)? {
        0 => Ok(false),
        1 | 2 => Ok(true),
        _ => Err(INVALID_VALUE),
    }
}

impl Attributes for Description {
    fn set(&mut self, attribute: u32, value: &[u8]) -> Outcome {
        match attribute {
            0 => self.compute = Description::new(as_u32(value)?, self.scale)?.compute,
            1 => self.scale = Description::new(self.compute, as_u32(value)?)?.scale,
            2 if as_u32(value)? == 0 => {}
            3 => self.transposes[0] = transposes(value)?,
            4 => self.transposes[1] = transposes(value)?,
            5 if as_u32(value)? == 0 => {}
            7 => match as_u32(value)? {
                known @ (1 | 2 | 4 | 6) => self.epilogue = known,
                other => return Err(refuse(NOT_SUPPORTED, format_args!("epilogue {other}"))),
            },
            8 => self.bias = as_u64(value)? as usize,
            10 => self.bias_stride = as_u64(value)? as i64,
            17 | 18 => self.scales[attribute as usize - 17] = as_u64(value)? as usize,
            25 => self.is_fast = number::<1>(value)?[0] != 0,
            26 => self.bias_type = Some(element(as_u32(value)?)?),
            31 | 32 => self.scale_modes[attribute as usize - 31] = as_u32(value)?,
            _ => {
                return Err(refuse(
                    INVALID_VALUE,
                    format_args!("attribute {attribute} of a product cannot be {value:?}"),
                ));
            }
        }
        Ok(())
    }

    fn get(&self, attribute: u32) -> Option<Vec<u8>> {
        Some(match attribute {
            0 => bytes_of(self.compute),
            1 => bytes_of(self.scale),
            2 => bytes_of(0),
            3 | 4 => bytes_of(self.transposes[attribute as usize - 3].into()),
            7 => bytes_of(self.epilogue),
            8 => (self.bias as u64).to_ne_bytes().into(),
            10 => self.bias_stride.to_ne_bytes().into(),
            _ => return None,
        })
    }
}

impl Layout {
    pub fn new(dtype: u32, rows: u64, cols: u64, ld: i64) -> Result<Layout, Status> {
        let (rows, cols) = (rows as usize, cols as usize);
        Ok(Layout { element: element(dtype)?, is_by_rows: false, rows, cols, ld, batches: 1, stride: 0 })
    }
}

impl Attributes for Layout {
    fn set(&mut self, attribute: u32, value: &[u8]) -> Outcome {
        match attribute {
            0 => self.element = element(as_u32(value)?)?,
            1 => match as_u32(value)? {
                order @ (0 | 1) => self.is_by_rows = order == 1,
                order => return Err(refuse(NOT_SUPPORTED, format_args!("order {order} of a matrix"))),
            },
            2 => self.rows = as_u64(value)? as usize,
            3 => self.cols = as_u64(value)? as usize,
            4 => self.ld = as_u64(value)? as i64,
            5 => self.batches = as_u32(value)? as i32,
            6 => self.stride = as_u64(value)? as i64,
            _ => return Err(refuse(INVALID_VALUE, format_args!("unknown attribute {attribute} of a layout"))),
        }
        Ok(())
    }

    fn get(&self, attribute: u32) -> Option<Vec<u8>> {
        Some(match attribute {
            0 => bytes_of(self.element.number()),
            1 => bytes_of(self.is_by_rows.into()),
            2 => (self.rows as u64).to_ne_bytes().into(),
            3 => (self.cols as u64).to_ne_bytes().into(),
            4 => self.ld.to_ne_bytes().into(),
            5 => bytes_of(self.batches as u32),
            6 => self.stride.to_ne_bytes().into(),
            _ => return None,
        })
    }
}

impl Default for Preference {
    fn default() -> Preference {
        Preference { workspace_most: 0, reduction_schemes: 7, alignments: [256; 4] }
    }
}

impl Preference {
    /// For a call that names no algorithm.
    pub fn for_pointers(pointers: [usize; 4], workspace_bytes: usize) -> Preference {
        let alignments = pointers.map(|p| 1 << p.trailing_zeros().min(8));
        Preference { workspace_most: workspace_bytes as u64, alignments, ..Preference::default() }
    }
}

impl Attributes for Preference {
    fn set(&mut self, attribute: u32, value: &[u8]) -> Outcome {
        match attribute {
            // Search mode: the best fit is the only one.
            0 if as_u32(value)? == 0 => {}
            1 => self.workspace_most = as_u64(value)?,
            3 => self.reduction_schemes = as_u32(value)?,
            5..=8 => {
                let bytes = as_u32(value)?;
                if !bytes.is_power_of_two() {
                    return Err(INVALID_VALUE);
                }
                self.alignments[attribute as usize - 5] = bytes;
            }
            _ => {
                return Err(refuse(
                    INVALID_VALUE,
                    format_args!("attribute {attribute} of a preference cannot be {value:?}"),
                ));
            }
        }
        Ok(())
    }

    fn get(&self, attribute: u32) -> Option<Vec<u8>> {
        Some(match attribute {
            0 => bytes_of(0),
            1 => self.workspace_most.to_ne_bytes().into(),
            3 => bytes_of(self.reduction_schemes),
            5..=8 => bytes_of(self.alignments[attribute as usize - 5]),
            _ => return None,
        })
    }
}
