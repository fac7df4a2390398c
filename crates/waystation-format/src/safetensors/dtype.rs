//! The element types that safetensors 0.8 knows, by name and width.

/// An element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // the names of the format say all there is
pub enum Dtype {
    F4,
    F6E2m3,
    F6E3m2,
    Bool,
    U8,
    I8,
    F8E5m2,
    F8E4m3,
    F8E8m0,
    F8E4m3fnuz,
    F8E5m2fnuz,
    I16,
    U16,
    F16,
    Bf16,
    I32,
    U32,
    F32,
    C64,
    F64,
    I64,
    U64,
}

impl Dtype {
    /// Every element type, narrow to wide, in declaration order.
    pub const ALL: [Dtype; 22] = [
        Dtype::F4,
        Dtype::F6E2m3,
        Dtype::F6E3m2,
        Dtype::Bool,
        Dtype::U8,
        Dtype::I8,
        Dtype::F8E5m2,
        Dtype::F8E4m3,
        Dtype::F8E8m0,
        Dtype::F8E4m3fnuz,
        Dtype::F8E5m2fnuz,
        Dtype::I16,
        Dtype::U16,
        Dtype::F16,
        Dtype::Bf16,
        Dtype::I32,
        Dtype::U32,
        Dtype::F32,
        Dtype::C64,
        Dtype::F64,
        Dtype::I64,
        Dtype::U64,
    ];

    /// The name in a header.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::Bool => "BOOL",
            Dtype::F4 => "F4",
            Dtype::F6E2m3 => "F6_E2M3",
            Dtype::F6E3m2 => "F6_E3M2",
            Dtype::U8 => "U8",
            Dtype::I8 => "I8",
            Dtype::F8E5m2 => "F8_E5M2",
            Dtype::F8E4m3 => "F8_E4M3",
            Dtype::F8E8m0 => "F8_E8M0",
            Dtype::F8E4m3fnuz => "F8_E4M3FNUZ",
            Dtype::F8E5m2fnuz => "F8_E5M2FNUZ",
            Dtype::I16 => "I16",
            Dtype::U16 => "U16",
            Dtype::F16 => "F16",
            Dtype::Bf16 => "BF16",
            Dtype::I32 => "I32",
            Dtype::U32 => "U32",
            Dtype::F32 => "F32",
            Dtype::C64 => "C64",
            Dtype::F64 => "F64",
            Dtype::I64 => "I64",
            Dtype::U64 => "U64",
        }
    }

    /// The element type that a header calls `name`.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name)
    }

    /// Width of one element.
    pub fn bits(self) -> u64 {
        match self {
            Dtype::F4 => 4,
            Dtype::F6E2m3 | Dtype::F6E3m2 => 6,
            Dtype::Bool
            | Dtype::U8
            | Dtype::I8
            | Dtype::F8E5m2
            | Dtype::F8E4m3
            | Dtype::F8E8m0
            | Dtype::F8E4m3fnuz
            | Dtype::F8E5m2fnuz => 8,
            Dtype::I16 | Dtype::U16 | Dtype::F16 | Dtype::Bf16 => 16,
            Dtype::I32 | Dtype::U32 | Dtype::F32 => 32,
            Dtype::C64 | Dtype::F64 | Dtype::I64 | Dtype::U64 => 64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_is_listed_once_in_order_and_found_by_name() {
        for (index, dtype) in Dtype::ALL.into_iter().enumerate() {
            assert_eq!(dtype as usize, index);
            assert_eq!(Dtype::from_name(dtype.name()), Some(dtype));
        }
        assert_eq!(Dtype::from_name("f32"), None);
    }

    #[test]
    fn the_reference_implementation_has_the_same_types() {
        for dtype in Dtype::ALL {
            let theirs: safetensors::Dtype =
                serde_json::from_value(serde_json::Value::from(dtype.name())).unwrap();
            assert_eq!(theirs.bitsize() as u64, dtype.bits(), "{}", dtype.name());
        }
    }
}
