//! The `# format` section of `_native.pyi`: headers, tables and sealed JSON. Pure calls on bytes.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyString, PyTuple};
use waystation_format::safetensors::{self, Dtype, Header, Planned};
use waystation_format::table::{self, TableKind};
use waystation_format::{Error, Kind, checksum, sealed};

use crate::error::{guarded, to_py};

/// Adds the names of this file to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("BLOCK_BYTES", checksum::BLOCK_BYTES)?;
    module.add("ERROR_KINDS", PyTuple::new(py, Kind::ALL.map(Kind::name))?)?;
    module.add("TABLE_KINDS", PyTuple::new(py, TableKind::ALL.map(TableKind::name))?)?;
    module.add_function(wrap_pyfunction!(crc64, module)?)?;
    module.add_function(wrap_pyfunction!(crc32c, module)?)?;
    module.add_function(wrap_pyfunction!(seal_json, module)?)?;
    module.add_function(wrap_pyfunction!(open_sealed_json, module)?)?;
    module.add_function(wrap_pyfunction!(encode_table, module)?)?;
    module.add_function(wrap_pyfunction!(decode_table, module)?)?;
    module.add_function(wrap_pyfunction!(parse_safetensors_header, module)?)?;
    module.add_function(wrap_pyfunction!(parse_safetensors_index, module)?)?;
    module.add_function(wrap_pyfunction!(parse_checksums, module)?)?;
    module.add_function(wrap_pyfunction!(build_safetensors_header, module)?)?;
    Ok(())
}

/// A contiguous buffer of any Python object, held for the length of one call.
pub struct Bytes(PyUntypedBuffer);

impl Bytes {
    /// The buffer of `owner`, which must be C-contiguous; its element type does not matter.
    pub fn of(owner: &Bound<'_, PyAny>) -> PyResult<Self> {
        let buffer = PyUntypedBuffer::get(owner)?;
        if !buffer.is_c_contiguous() {
            return Err(to_py(invalid("a buffer must be C-contiguous".to_owned())));
        }
        Ok(Self(buffer))
    }

    /// Its bytes.
    pub fn as_slice(&self) -> &[u8] {
        if self.0.len_bytes() == 0 {
            return &[];
        }
        // SAFETY: the buffer is contiguous, non-empty and stays exported while `self` lives. Only
        // Waystation calls this module, and it hands over buffers that nobody writes meanwhile.
        unsafe { std::slice::from_raw_parts(self.0.buf_ptr().cast::<u8>(), self.0.len_bytes()) }
    }

    /// The 64-bit words in it, copied.
    pub fn words<T>(&self, decode: fn([u8; 8]) -> T) -> Result<Vec<T>, Error> {
        let (words, rest) = self.as_slice().as_chunks::<8>();
        if !rest.is_empty() {
            return Err(invalid(format!("{} bytes are no whole number of 64-bit words", self.0.len_bytes())));
        }
        Ok(words.iter().map(|&word| decode(word)).collect())
    }
}

/// A contiguous buffer that is written to, held for the length of one call.
pub struct WritableBytes(PyUntypedBuffer);

impl WritableBytes {
    /// The buffer of `owner`, which must be C-contiguous and writable; its element type does not matter.
    pub fn of(owner: &Bound<'_, PyAny>) -> PyResult<Self> {
        let buffer = PyUntypedBuffer::get(owner)?;
        if !buffer.is_c_contiguous() || buffer.readonly() {
            return Err(to_py(invalid("a buffer must be C-contiguous and writable".to_owned())));
        }
        Ok(Self(buffer))
    }

    /// Its bytes.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        if self.0.len_bytes() == 0 {
            return &mut [];
        }
        // SAFETY: the buffer is contiguous, non-empty and stays exported while `self` lives. Only Waystation
        // calls this module, and it hands over new memory that nobody else has.
        unsafe { std::slice::from_raw_parts_mut(self.0.buf_ptr().cast::<u8>(), self.0.len_bytes()) }
    }
}

/// The words of a plan: plans are small, copied, and decoded without the GIL.
pub fn plan_words(plan: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    Bytes::of(plan)?.words(i64::from_ne_bytes).map_err(to_py)
}

fn invalid(message: String) -> Error {
    Error::new(Kind::InvalidInput, message)
}

#[pyfunction]
#[pyo3(signature = (data, /))]
fn crc32c(py: Python<'_>, data: &Bound<'_, PyAny>) -> PyResult<u32> {
    let data = Bytes::of(data)?;
    py.detach(|| guarded(|| Ok(checksum::crc32c(data.as_slice()))))
}

#[pyfunction]
#[pyo3(signature = (data, /))]
fn crc64(py: Python<'_>, data: &Bound<'_, PyAny>) -> PyResult<u64> {
    let data = Bytes::of(data)?;
    py.detach(|| guarded(|| Ok(checksum::crc64(data.as_slice()))))
}

#[pyfunction]
#[pyo3(signature = (body, /))]
fn seal_json<'py>(py: Python<'py>, body: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
    let body = Bytes::of(body)?;
    let sealed = py.detach(|| guarded(|| sealed::seal(body.as_slice())))?;
    Ok(PyBytes::new(py, &sealed))
}

#[pyfunction]
#[pyo3(signature = (data, path, /))]
fn open_sealed_json<'py>(
    py: Python<'py>,
    data: &Bound<'py, PyAny>,
    path: &str,
) -> PyResult<Bound<'py, PyBytes>> {
    let data = Bytes::of(data)?;
    let open = || guarded(|| sealed::open(data.as_slice()).map_err(|error| error.with("path", path)));
    Ok(PyBytes::new(py, py.detach(open)?))
}

#[pyfunction]
#[pyo3(signature = (kind, sections, /))]
fn encode_table<'py>(
    py: Python<'py>,
    kind: &str,
    sections: Vec<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyBytes>> {
    let kind = table_kind(kind)?;
    let sections = sections.iter().map(Bytes::of).collect::<PyResult<Vec<_>>>()?;
    let encode = || {
        let sections: Vec<&[u8]> = sections.iter().map(Bytes::as_slice).collect();
        guarded(|| table::encode(kind, &sections))
    };
    Ok(PyBytes::new(py, &py.detach(encode)?))
}

#[pyfunction]
#[pyo3(signature = (kind, data, path, /))]
fn decode_table<'py>(
    py: Python<'py>,
    kind: &str,
    data: &Bound<'py, PyAny>,
    path: &str,
) -> PyResult<Bound<'py, PyList>> {
    let kind = table_kind(kind)?;
    let data = Bytes::of(data)?;
    let decode =
        || guarded(|| table::decode(kind, data.as_slice()).map_err(|error| error.with("path", path)));
    let sections = py.detach(decode)?;
    PyList::new(py, sections.iter().map(|entries| PyBytes::new(py, entries)))
}

/// The table called `name`.
pub fn table_kind(name: &str) -> PyResult<TableKind> {
    TableKind::from_name(name).ok_or_else(|| to_py(invalid(format!("there is no table of {name:?}"))))
}

#[pyfunction]
#[pyo3(signature = (data, file_bytes, path, /))]
fn parse_safetensors_header<'py>(
    py: Python<'py>,
    data: &Bound<'py, PyAny>,
    file_bytes: u64,
    path: &str,
) -> PyResult<Bound<'py, PyTuple>> {
    let data = Bytes::of(data)?;
    let parse = || safetensors::parse(data.as_slice(), file_bytes).map_err(|error| error.with("path", path));
    let header = py.detach(|| guarded(parse))?;
    header_to_py(py, &header)
}

fn header_to_py<'py>(py: Python<'py>, header: &Header) -> PyResult<Bound<'py, PyTuple>> {
    let metadata = match &header.metadata {
        None => py.None().into_bound(py),
        Some(pairs) => {
            let metadata = PyDict::new(py);
            for (key, value) in pairs {
                metadata.set_item(key, value)?;
            }
            metadata.into_any()
        }
    };
    // A file holds thousands of tensors of few dtypes: the names of those are made once.
    let names = Dtype::ALL.map(|dtype| PyString::new(py, dtype.name()));
    let tensors = PyList::empty(py);
    for tensor in &header.tensors {
        let dtype = &names[tensor.dtype as usize];
        let shape = PyTuple::new(py, &tensor.shape)?;
        tensors.append((&tensor.name, dtype, shape, tensor.begin, tensor.end))?;
    }
    (metadata, tensors, header.data_start).into_pyobject(py)
}

#[pyfunction]
#[pyo3(signature = (data, path, /))]
fn parse_safetensors_index<'py>(
    py: Python<'py>,
    data: &Bound<'py, PyAny>,
    path: &str,
) -> PyResult<Bound<'py, PyDict>> {
    let data = Bytes::of(data)?;
    let parse = || safetensors::parse_index(data.as_slice()).map_err(|error| error.with("path", path));
    let entries = py.detach(|| guarded(parse))?;
    // A model has thousands of tensors in few files: the names of those are made once.
    let mut names: HashMap<&str, Bound<'py, PyString>> = HashMap::new();
    let weight_map = PyDict::new(py);
    for (tensor, file) in &entries {
        let name = names.entry(file).or_insert_with(|| PyString::new(py, file));
        weight_map.set_item(tensor, &*name)?;
    }
    Ok(weight_map)
}

#[pyfunction]
#[pyo3(signature = (data, path, /))]
fn parse_checksums<'py>(
    py: Python<'py>,
    data: &Bound<'py, PyAny>,
    path: &str,
) -> PyResult<Bound<'py, PyDict>> {
    let data = Bytes::of(data)?;
    let parse = || {
        let body = sealed::open(data.as_slice());
        body.and_then(safetensors::parse_sums).map_err(|error| error.with("path", path))
    };
    let files = PyDict::new(py);
    for sums in py.detach(|| guarded(parse))? {
        files.set_item(sums.name, (sums.nbytes, PyBytes::new(py, &sums.blocks)))?;
    }
    Ok(files)
}

/// `(name, dtype, shape)`
type PlannedTensor<'py> = (Bound<'py, PyString>, Bound<'py, PyString>, Bound<'py, PyAny>);

#[pyfunction]
#[pyo3(signature = (tensors, metadata, align_bytes, /))]
fn build_safetensors_header<'py>(
    py: Python<'py>,
    tensors: Vec<PlannedTensor<'py>>,
    metadata: Option<Bound<'py, PyDict>>,
    align_bytes: u64,
) -> PyResult<Bound<'py, PyBytes>> {
    // Tensors are many and of few kinds, of which Python passes the same objects again and again.
    let mut known: HashMap<(usize, usize), (Dtype, Vec<u64>)> = HashMap::new();
    let mut plan = |(name, dtype, shape): &PlannedTensor<'py>| {
        let name = text(name)?;
        let kind = (dtype.as_ptr() as usize, shape.as_ptr() as usize);
        let (dtype, shape) = match known.entry(kind) {
            Entry::Occupied(found) => found.into_mut(),
            Entry::Vacant(place) => place.insert(kind_of(&name, dtype, shape)?),
        };
        Ok(Planned { name: name.into(), dtype: *dtype, shape: shape.clone().into() })
    };
    let tensors = tensors.iter().map(&mut plan).collect::<PyResult<Vec<_>>>()?;
    let metadata = metadata.map(|metadata| text_pairs(&metadata)).transpose()?;
    let build = || guarded(|| safetensors::build(&tensors, metadata.as_deref(), align_bytes));
    Ok(PyBytes::new(py, &py.detach(build)?))
}

fn kind_of(name: &str, dtype: &Bound<'_, PyString>, shape: &Bound<'_, PyAny>) -> PyResult<(Dtype, Vec<u64>)> {
    let about = |message: String| to_py(invalid(message).with("tensor", name));
    let Some(found) = Dtype::from_name(&text(dtype)?) else {
        return Err(about(format!("safetensors has no dtype {dtype:?}")));
    };
    let Ok(extents) = shape.extract::<Vec<u64>>() else {
        return Err(about(format!("the shape {shape:?} does not consist of unsigned 64-bit extents")));
    };
    Ok((found, extents))
}

fn text_pairs(pairs: &Bound<'_, PyDict>) -> PyResult<Vec<(String, String)>> {
    let string = |value: Bound<'_, PyAny>| match value.cast_into::<PyString>() {
        Ok(value) => text(&value),
        Err(_) => Err(to_py(invalid("the metadata of safetensors map strings to strings".to_owned()))),
    };
    pairs.iter().map(|(key, value)| Ok((string(key)?, string(value)?))).collect()
}

/// The text of a Python string, which may hold lone surrogates: those no file can hold.
fn text(string: &Bound<'_, PyString>) -> PyResult<String> {
    let lone = |_| to_py(invalid(format!("{string:?} holds a lone surrogate, which is no text")));
    string.to_cow().map(|text| text.into_owned()).map_err(lone)
}
