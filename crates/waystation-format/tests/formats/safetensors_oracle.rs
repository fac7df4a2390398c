//! The `safetensors` crate as the oracle, in both directions, on made-up files and on damaged ones.

use std::collections::{HashMap, HashSet};

use proptest::prelude::*;
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use waystation_format::safetensors::{Dtype, Header, Planned, build, parse};

type Named = (String, Dtype, Vec<u64>);

/// Any text without `NUL`, often with what needs an escape.
fn text() -> impl Strategy<Value = String> {
    prop_oneof![
        r"[a-z]{1,4}(\.[a-z0-9]{1,3}){0,3}",
        r#"["\\/{}\[\],: \t\n\x01-\x1f\x7fé😀]{0,6}"#,
        "[^\0]{0,8}"
    ]
}

fn tensors() -> impl Strategy<Value = Vec<Named>> {
    let dtype = prop::sample::select(Dtype::ALL.to_vec());
    let shape = prop::collection::vec(0u64..5, 0..4);
    let one = (text(), dtype, shape).prop_map(|(name, dtype, mut shape)| {
        if dtype.bits() < 8 {
            shape.push(4); // whole bytes
        }
        (name, dtype, shape)
    });
    prop::collection::vec(one, 0..8).prop_map(|mut tensors| {
        let mut seen = HashSet::from(["__metadata__".to_owned()]);
        tensors.retain(|(name, ..)| seen.insert(name.clone()));
        tensors
    })
}

fn metadata() -> impl Strategy<Value = Option<Vec<(String, String)>>> {
    prop::option::of(
        prop::collection::hash_map(text(), text(), 0..4).prop_map(|map| map.into_iter().collect()),
    )
}

fn nbytes((_, dtype, shape): &Named) -> usize {
    (shape.iter().product::<u64>() * dtype.bits() / 8) as usize
}

fn header_of(tensors: &[Named], metadata: Option<&[(String, String)]>, align_bytes: u64) -> Vec<u8> {
    let plan = |(name, dtype, shape): &Named| Planned {
        name: name.clone().into(),
        dtype: *dtype,
        shape: shape.clone().into(),
    };
    build(&tensors.iter().map(plan).collect::<Vec<_>>(), metadata, align_bytes).unwrap()
}

fn parse_file(file: &[u8]) -> waystation_format::Result<Header> {
    parse(file, file.len() as u64)
}

fn theirs(dtype: Dtype) -> safetensors::Dtype {
    serde_json::from_value(dtype.name().into()).unwrap()
}

/// Both readers say the same of a file that both accept.
fn assert_same(ours: &Header, file: &[u8]) {
    let reference = SafeTensors::deserialize(file).unwrap();
    assert_eq!(reference.len(), ours.tensors.len());
    for tensor in &ours.tensors {
        let view = reference.tensor(&tensor.name).unwrap();
        assert_eq!(view.dtype(), theirs(tensor.dtype));
        assert_eq!(view.shape().iter().map(|&extent| extent as u64).collect::<Vec<_>>(), tensor.shape);
        let data = &file[tensor.begin as usize..tensor.end as usize];
        assert_eq!((view.data().as_ptr(), view.data().len()), (data.as_ptr(), data.len()));
    }
    let (_, described) = SafeTensors::read_metadata(file).unwrap();
    let text: Option<HashMap<_, _>> = ours.metadata.clone().map(|pairs| pairs.into_iter().collect());
    assert_eq!(described.metadata(), &text);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(256) })]

    #[test]
    fn what_we_write_both_read(tensors in tensors(), metadata in metadata(), align in 3u32..13) {
        let header = header_of(&tensors, metadata.as_deref(), 1 << align);
        prop_assert_eq!(header.len() % (1 << align), 0);
        let file = [header.clone(), vec![7; tensors.iter().map(nbytes).sum()]].concat();
        let parsed = parse_file(&file).unwrap();
        assert_same(&parsed, &file);
        prop_assert_eq!(parsed.data_start, header.len() as u64);
        prop_assert_eq!(&parsed.metadata, &metadata);
        // Tensors without bytes may trade places; all others stay in the order given.
        let order = |named: &Named| nbytes(named) > 0;
        let given: Vec<_> = tensors.iter().filter(|named| order(named)).cloned().collect();
        let found = parsed.tensors.into_iter().map(|one| (one.name, one.dtype, one.shape));
        prop_assert_eq!(found.filter(order).collect::<Vec<_>>(), given);
    }

    #[test]
    fn what_they_write_we_read(tensors in tensors(), metadata in metadata()) {
        let data = vec![7; tensors.iter().map(nbytes).max().unwrap_or(0)];
        let view = |named: &Named| {
            let shape = named.2.iter().map(|&extent| extent as usize).collect();
            (named.0.clone(), TensorView::new(theirs(named.1), shape, &data[..nbytes(named)]).unwrap())
        };
        // Their writer makes invalid JSON of empty metadata without tensors, which no reader takes.
        let metadata = metadata.filter(|pairs| !(pairs.is_empty() && tensors.is_empty()));
        let metadata: Option<HashMap<_, _>> = metadata.map(|pairs| pairs.into_iter().collect());
        let file = safetensors::serialize(tensors.iter().map(view), metadata).unwrap();
        assert_same(&parse_file(&file).unwrap(), &file);
    }

    #[test]
    fn what_they_refuse_we_refuse(
        tensors in tensors(),
        metadata in metadata(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), edit()), 1..4),
    ) {
        let mut file = header_of(&tensors, metadata.as_deref(), 8);
        file.resize(file.len() + tensors.iter().map(nbytes).sum::<usize>(), 0);
        for (place, edit) in &edits {
            edit.apply(place, &mut file);
        }
        if let Ok(header) = parse_file(&file) {
            assert_same(&header, &file);
        }
    }
}

/// One way to damage a header.
#[derive(Clone, Debug)]
enum Edit {
    Flip(u8),
    Set(u8),
    Insert(&'static str),
    Remove(usize),
    Cut,
}

fn edit() -> impl Strategy<Value = Edit> {
    let pieces =
        ["0", "1", "9", "-", ".", "e1", "\"", ",", ":", "{", "}", "[", "]", " ", "\\", "\\u0000", "\\ud800"];
    let fields = ["\"dtype\":\"U8\",", "\"shape\":[0],", "\"x\":1,", "null", "\"__metadata__\":{},", "\u{1}"];
    prop_oneof![
        (0u8..8).prop_map(|bit| Edit::Flip(1 << bit)),
        (0x20u8..0x7f).prop_map(Edit::Set),
        prop::sample::select([&pieces[..], &fields[..]].concat()).prop_map(Edit::Insert),
        (1usize..6).prop_map(Edit::Remove),
        Just(Edit::Cut),
    ]
}

impl Edit {
    fn apply(&self, place: &prop::sample::Index, file: &mut Vec<u8>) {
        if file.is_empty() {
            return;
        }
        let at = place.index(file.len());
        match self {
            Edit::Flip(mask) => file[at] ^= mask,
            Edit::Set(byte) => file[at] = *byte,
            Edit::Insert(piece) => drop(file.splice(at..at, piece.bytes())),
            Edit::Remove(count) => drop(file.drain(at..(at + count).min(file.len()))),
            Edit::Cut => file.truncate(at),
        }
        // Half of the damage should get past the check of the length.
        if at.is_multiple_of(2) && file.len() >= 8 {
            let end = file.iter().rposition(|&byte| byte == b'}' || byte == b' ').unwrap_or(7);
            let length = (end.max(7) as u64 - 7).to_le_bytes();
            file[..8].copy_from_slice(&length);
        }
    }
}

#[test]
fn twenty_thousand_tensors() {
    let tensors: Vec<Named> =
        (0..20_000).map(|index| (format!("model.layers.{index}.weight"), Dtype::Bf16, vec![2, 3])).collect();
    let header = header_of(&tensors, None, 4096);
    let file = [header, vec![0; 12 * tensors.len()]].concat();
    let parsed = parse_file(&file).unwrap();
    assert!(parsed.tensors.iter().map(|one| &one.name).eq(tensors.iter().map(|one| &one.0)));
    assert_same(&parsed, &file);
}
