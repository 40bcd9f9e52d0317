"""The HTTP process: OpenAI API in, requests to the router, text out.

`front.app.create_app` makes the ASGI application, `front.server.serve` runs it, `front.tokenizer.TokenizerService`
holds the model's words. Nothing here imports torch.
"""
