-- Streams that flow from a replica to the client without passing through a router's process.
--
-- HAProxy runs this for each call that may be streamed. It asks a router, through a listener of
-- HAProxy's own which balances over the routers and knows which of them are up. The router checks,
-- decides and sends the call to a replica as usual. If the answer is a stream, the router does not
-- send it, but answers with its address:
--
--   x-sluice-stream: HOST:PORT TICKET
--
-- The ticket opens that stream once, at the replica's own port. There the stream comes in records:
--
--   LENGTH CHUNKS\n   then LENGTH bytes for the client; CHUNKS says which output tokens are in them
--   0\n                            keep-alive: the replica is up
--   end\n                          after the last record
--
-- If there is no connection, or it ends before `end`, or is silent for SILENCE_S, this program reports
-- to the router what the client has received (POST /sluice/broken). The router answers with the rest of
-- the stream, which comes from another replica. The router ends its first answer once it knows that the
-- stream is over; it detects that the client has left by the end of that connection.

local CONNECT_S = 1
local SILENCE_S = 5
local ANSWER_S = 3600
local PART = 65536

-- Where HAProxy listens for this: the argument of lua-load-per-thread.
local ROUTERS = ...

-- Headers of a connection, not of a request; and headers that only this program sets.
local HOP_BY_HOP = {
  ["connection"] = true, ["keep-alive"] = true, ["proxy-connection"] = true, ["te"] = true,
  ["transfer-encoding"] = true, ["upgrade"] = true, ["content-length"] = true, ["expect"] = true,
  ["x-sluice-edge"] = true, ["x-sluice-backend"] = true,
}

local UNAVAILABLE = '{"error": {"message": "No router answers.", "type": "server_error", '
  .. '"param": null, "code": "no_router"}}'
local BROKEN = 'data: {"error": {"message": "The stream broke off after it had begun.", '
  .. '"type": "server_error", "param": null, "code": "stream_broken"}}\n\n'

-- A connection to "HOST:PORT" that fails after a silence of `patience_s`.
local function connect(address, patience_s)
  local socket = core.tcp()
  socket:settimeout(CONNECT_S)
  if not socket:connect(address) then
    socket:close()
    return nil
  end
  socket:settimeout(patience_s)
  return socket
end

-- The head of the request as a router gets it, by way of HAProxy's own listener for this.
local function head_of(applet)
  local target = applet.path
  if applet.qs ~= nil and applet.qs ~= "" then target = target .. "?" .. applet.qs end
  local lines = {applet.method .. " " .. target .. " HTTP/1.1", "connection: close"}
  for name, values in pairs(applet.headers) do
    if not HOP_BY_HOP[name] then
      for _, value in pairs(values) do lines[#lines + 1] = name .. ": " .. value end
    end
  end
  lines[#lines + 1] = "content-length: " .. applet.headers["content-length"][0]
  lines[#lines + 1] = "x-sluice-edge: direct"
  lines[#lines + 1] = "x-sluice-backend: " .. applet:get_var("txn.sluice_backend") .. "\r\n\r\n"
  return table.concat(lines, "\r\n")
end

-- Whether all of `data` was taken: after the end of a connection the API says -1.
local function send(socket, data)
  local count = socket:send(data)
  return count ~= nil and count >= 0
end

-- Status and headers of an HTTP response; nil if there is none.
local function read_head(socket)
  local line = socket:receive("*l")
  local status = line and tonumber(line:match("^HTTP/1%.[01] (%d%d%d)"))
  if not status then return nil end
  local head = {status = status, headers = {}}
  while true do
    line = socket:receive("*l")
    if not line then return nil end
    if line == "" then return head end
    local name, value = line:match("^([^:]+):%s*(.*)$")
    if not name then return nil end
    name = name:lower()
    if name == "x-sluice-stream" then
      head.stream = value
    elseif name == "x-sluice-router" then
      head.router = value
    elseif name == "content-length" then
      head.length = tonumber(value)
    elseif name == "transfer-encoding" then
      head.chunked = true
    elseif not HOP_BY_HOP[name] then
      head.events = head.events or name == "content-type" and value:find("^text/event%-stream") ~= nil
      head.headers[#head.headers + 1] = {name, value}
    end
  end
end

-- Ask a router; the connection and the head of its answer.
local function ask(applet)
  local length = tonumber(applet.headers["content-length"][0])
  local body = length > 0 and applet:receive(length) or ""
  local socket = #body == length and connect(ROUTERS, ANSWER_S)
  if not socket then return nil end
  if send(socket, head_of(applet) .. body) then
    local head = read_head(socket)
    if head then return socket, head end
  end
  socket:close()
  return nil
end

local function start(applet, head)
  applet:set_status(head.status)
  for _, header in ipairs(head.headers) do applet:add_header(header[1], header[2]) end
  if head.length and not head.stream then applet:add_header("content-length", head.length) end
  applet:start_response()
end

-- Forward a body in HTTP chunks. Returns whether it was complete.
local function hand_on_chunks(applet, socket)
  while true do
    local length = tonumber(socket:receive("*l") or "", 16)
    if not length then return false end
    if length == 0 then return true end
    local data = socket:receive(length)
    if not data or #data < length or not socket:receive("*l") then return false end
    applet:send(data)
  end
end

-- Forward a body that the router sends itself. Returns whether it was complete.
local function hand_on(applet, socket, head)
  if head.chunked then return hand_on_chunks(applet, socket) end
  local left = head.length or 0
  while left > 0 do
    local part, _, rest = socket:receive(math.min(left, PART))
    part = part or rest
    if not part or part == "" then return false end
    applet:send(part)
    left = left - #part
  end
  return true
end

-- Send to the client, which may be slow: a socket's timeout counts silence in both directions. After a
-- slow client the timeout stays long, because ending the connection would lose unread data.
local function send_patiently(applet, socket, data)
  local began = core.now().sec
  socket:settimeout(ANSWER_S)
  applet:send(data)
  if core.now().sec - began < SILENCE_S - 2 then socket:settimeout(SILENCE_S) end
end

-- Forward a replica's stream. Returns whether it was complete. What the client gets is added to `got`.
local function hand_on_stream(applet, stream, got)
  local address, ticket = stream:match("^(%S+) (%S+)$")
  local socket = address and connect(address, SILENCE_S)
  if not socket then return false end
  send(socket, ticket .. "\n")
  while true do
    local line = socket:receive("*l")
    if line == "end" then
      socket:receive("*l")  -- the replica closes first: so it knows that all has arrived
      socket:close()
      return true
    end
    local length, chunks = (line or ""):match("^(%d+) ?(.*)$")
    local data = ""
    length = tonumber(length)
    if length and length > 0 then data = socket:receive(length) end
    if not length or not data or #data < length then
      socket:close()
      return false
    end
    if chunks ~= "" then
      if length > 0 then send_patiently(applet, socket, data) end
      got.chunks[#got.chunks + 1] = chunks
      got.bytes = got.bytes + length
      if not got.created then got.created = data:match('"created": ?%d+') end
    end
  end
end

-- Report a broken stream to the router, and forward its rest. Returns whether that was complete.
local function hand_on_rest(applet, head, got)
  -- HAProxy says an address of IPv6 without brackets.
  local host, port = head.router:match("^(.*):(%d+)$")
  if host and host:find(":") then host = "[" .. host .. "]" end
  local socket = host and connect(host .. ":" .. port, ANSWER_S)
  if not socket then return false end
  local body = table.concat(got.chunks)
  local prefix = applet.path:match("^(.*)/v1/") or ""
  send(socket, "POST " .. prefix .. "/sluice/broken HTTP/1.1\r\nhost: router\r\nconnection: close"
    .. "\r\nx-sluice-ticket: " .. head.stream:match("%S+$") .. "\r\nx-sluice-bytes: " .. got.bytes
    .. "\r\nx-sluice-created: " .. (got.created or "")
    .. "\r\ncontent-length: " .. #body .. "\r\n\r\n" .. body)
  local rest = read_head(socket)
  local whole = rest and rest.status == 200 and hand_on(applet, socket, rest)
  socket:close()
  return whole
end

local function relay(applet)
  local socket, head = ask(applet)
  if not head then
    applet:set_status(503)
    applet:add_header("content-type", "application/json")
    applet:add_header("retry-after", "1")
    applet:start_response()
    applet:send(UNAVAILABLE)
    return
  end
  start(applet, head)
  local whole
  if head.stream then
    local got = {chunks = {}, bytes = 0}
    whole = hand_on_stream(applet, head.stream, got) or hand_on_rest(applet, head, got)
    if whole then socket:receive("*l") end  -- the end of the router's answer: it knows, too
  else
    whole = hand_on(applet, socket, head)
  end
  socket:close()
  if not whole then
    if not head.events then error("the router's answer is cut") end
    applet:send(BROKEN)
  end
end

core.register_service("sluice", "http", relay)
