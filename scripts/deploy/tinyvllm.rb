# A template: formula.sh puts in the version and the SHA-256 sums of a release. For a tap of one's own.
class Tinyvllm < Formula
  desc "Inference engine for language models: vLLM's core in one small binary"
  homepage "https://github.com/tinyvllm/tinyvllm"
  version "@VERSION@"
  license any_of: ["MIT", "Apache-2.0"]

  on_macos do
    depends_on arch: :arm64
    url "https://github.com/tinyvllm/tinyvllm/releases/download/v@VERSION@/tinyvllm-@VERSION@-aarch64-apple-darwin.tar.gz"
    sha256 "@SHA256:aarch64-apple-darwin@"
  end

  on_linux do
    on_arm do
      url "https://github.com/tinyvllm/tinyvllm/releases/download/v@VERSION@/tinyvllm-@VERSION@-aarch64-unknown-linux-musl.tar.gz"
      sha256 "@SHA256:aarch64-unknown-linux-musl@"
    end
    on_intel do
      url "https://github.com/tinyvllm/tinyvllm/releases/download/v@VERSION@/tinyvllm-@VERSION@-x86_64-unknown-linux-musl.tar.gz"
      sha256 "@SHA256:x86_64-unknown-linux-musl@"
    end
  end

  def install
    bin.install "tinyvllm"
    generate_completions_from_executable(bin/"tinyvllm", "completions", shells: [:bash, :zsh, :fish])
  end

  test do
    story = shell_output("#{bin}/tinyvllm --device cpu --temperature 0 --max-tokens 8 --prompt 'Once upon a time'")
    refute_empty story.strip
  end
end
