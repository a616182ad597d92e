import { defineConfig } from "vite";

// Fixed file names without hashes, so that the same source always gives the same files.
export default defineConfig({
  base: "./",
  build: {
    outDir: "../src/rookery/view/static",
    emptyOutDir: true,
    target: "es2022",
    cssTarget: ["chrome123", "firefox120", "safari17.5"], // have light-dark()
    modulePreload: false,
    assetsInlineLimit: 0,
    reportCompressedSize: false,
    rollupOptions: { output: { entryFileNames: "app.js", assetFileNames: "app.[ext]" } },
  },
});
