// Makes TypeScript of the service's OpenAPI document: node api_types.mjs openapi.json schema.ts
//
// Each schema becomes a type, each operation an entry of `Operations`, such as
// 'GET /machines/{machine}'. A page that reads a field that is gone no longer compiles. A schema whose numbers have bounds has them as
// attributes of inputs, too, such as `JobBounds`.
import { readFileSync, writeFileSync } from 'node:fs';

const [, , from, to] = process.argv;
const document = JSON.parse(readFileSync(from, 'utf8'));
const PREFIX = '/api/v1';

const isName = (text) => /^[A-Za-z_$][\w$]*$/.test(text);
const member = (name, isOptional, type) => `${isName(name) ? name : JSON.stringify(name)}${isOptional ? '?' : ''}: ${type}`;

function object(schema) {
  const required = schema.required ?? [];
  const members = Object.entries(schema.properties ?? {}).map(([name, part]) =>
    member(name, !required.includes(name), typeOf(part)),
  );
  if (members.length > 0) return `{ ${members.join('; ')} }`;
  const values = schema.additionalProperties;
  return values && typeof values === 'object' ? `Record<string, ${typeOf(values)}>` : 'Record<string, unknown>';
}

const PLAIN = { string: 'string', integer: 'number', number: 'number', boolean: 'boolean', null: 'null' };

function typeOf(schema) {
  if (schema.$ref) return schema.$ref.split('/').at(-1);
  const choice = schema.oneOf ?? schema.anyOf;
  if (choice) return `(${choice.map(typeOf).join(' | ')})`;
  if (schema.allOf) return `(${schema.allOf.map(typeOf).join(' & ')})`;
  if ('const' in schema) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(' | ');
  const types = [schema.type ?? 'unknown'].flat().map((type) => {
    if (type === 'array') return `(${typeOf(schema.items ?? {})})[]`;
    if (type === 'object') return object(schema);
    return PLAIN[type] ?? 'unknown';
  });
  return types.join(' | ');
}

/** Bounds and defaults of the numbers of a schema, as attributes of inputs. */
function bounds(name, { properties = {} }) {
  const attributes = ({ minimum: min, maximum: max, default: placeholder }) =>
    ({ min, max, ...(typeof placeholder === 'number' ? { placeholder: String(placeholder) } : {}) });
  const bounded = Object.entries(properties).filter(([, part]) => part.maximum !== undefined);
  const fields = Object.fromEntries(bounded.map(([field, part]) => [field, attributes(part)]));
  return bounded.length > 0 ? [`export const ${name}Bounds = ${JSON.stringify(fields)};`] : [];
}

function bodyOf(content) {
  const json = content?.['application/json'];
  return json ? typeOf(json.schema ?? {}) : 'never';
}

function operation(path, method, described) {
  const parameters = (place) =>
    (described.parameters ?? [])
      .filter((parameter) => parameter.in === place)
      .map((parameter) => member(parameter.name, place === 'query', typeOf(parameter.schema ?? {})));
  const good = Object.entries(described.responses).find(([status]) => status.startsWith('2'))?.[1];
  const answer = bodyOf(good?.content);
  const fields = [
    member('path', false, `{ ${parameters('path').join('; ')} }`),
    member('query', false, `{ ${parameters('query').join('; ')} }`),
    member('body', false, bodyOf(described.requestBody?.content)),
    member('answer', false, answer === 'never' ? 'void' : answer),
  ];
  return `  ${JSON.stringify(`${method.toUpperCase()} ${path.slice(PREFIX.length)}`)}: { ${fields.join('; ')} };`;
}

const types = Object.entries(document.components.schemas).map(([name, schema]) => `export type ${name} = ${typeOf(schema)};`);
const limits = Object.entries(document.components.schemas).flatMap(([name, schema]) => bounds(name, schema));
const operations = Object.entries(document.paths)
  .filter(([path]) => path.startsWith(PREFIX))
  .flatMap(([path, methods]) => Object.entries(methods).map(([method, described]) => operation(path, method, described)));
const lines = ['// Made by tools/api_types.mjs from the OpenAPI document.', ...types, ...limits, 'export interface Operations {', ...operations, '}'];
writeFileSync(to, `${lines.join('\n')}\n`);
