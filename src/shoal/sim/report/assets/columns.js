// Decode the columns of jobs: compressed, and numbers with all lowest bytes first.

const ARRAYS = { f4: Float32Array, u4: Uint32Array };

async function inflate(base64) {
  const text = atob(base64), packed = new Uint8Array(text.length);
  for (let i = 0; i < packed.length; i++) packed[i] = text.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

async function unpack(column) {
  if (column.kind === "words") {
    const words = JSON.parse(new TextDecoder().decode(await inflate(column.words)));
    return Array.from(await unpack(column.which), (i) => words[i]);
  }
  const planes = await inflate(column.data), size = ARRAYS[column.kind].BYTES_PER_ELEMENT, n = planes.length / size;
  const bytes = new Uint8Array(planes.length);
  for (let p = 0; p < size; p++) for (let i = 0; i < n; i++) bytes[i * size + p] = planes[p * n + i];
  return new ARRAYS[column.kind](bytes.buffer); // all platforms with a browser are little-endian
}

async function unpackAll(columns) {
  const names = Object.keys(columns).filter((name) => columns[name].kind);
  const values = await Promise.all(names.map((name) => unpack(columns[name])));
  return Object.fromEntries(names.map((name, i) => [name, values[i]]));
}
